"""Over the zoo: rows together equal each alone, any cut equals the whole, and all of it equals mlx-lm's own.

Bit for bit, but for families whose own code depends on the cut: their entries say why and how much.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.embedded import POOLINGS, asked, vectors
from tests.engines import Guesses, drive
from tests.zoo import ZOO, zoo_engine, zoo_model

JOINS = {1: 3, 2: 9, 5: 40}
CUTS = (1, 7, 16)
EXACTLY = "rows together equal each alone exactly"


@pytest.fixture(scope="module", params=ZOO)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def family(name):
    return ZOO[name]


@pytest.fixture(scope="module")
def watched(name):
    return zoo_engine(name)


def assert_close(logits, expected, tolerance=0.0):
    """Every draw's logits are the expected ones, relative to the largest of them."""
    assert logits.keys() == expected.keys()
    scale = max(np.abs(row).max() for row in expected.values())
    assert max(np.abs(logits[key] - row).max() for key, row in expected.items()) / scale <= tolerance


def test_mode(watched, family):
    verdict = watched.engine.verdict
    assert verdict.mode == family.mode
    assert verdict.mode == "alone" or verdict.reason.partition("; ")[0] == EXACTLY


def test_rows_joining_at_different_steps(watched):
    requests = {step: watched.request(f"{step}", length, 8, seed=step) for step, length in JOINS.items()}
    watched.logits.clear()
    alone = [watched.alone(request) for request in requests.values()]
    expected = dict(watched.logits)
    watched.logits.clear()
    assert [row.output for row in watched.together(requests)] == alone
    assert_close(watched.logits, expected)


def test_several_tokens_a_step(watched, family):
    """Whatever the drafts say, and whichever of them are wrong."""
    if family.mode != "spans":
        pytest.skip("rows of this mode cannot forget what was not accepted")
    requests = [watched.request(f"{n}", n, 12, seed=n) for n in (3, 20)]
    watched.logits.clear()
    alone = {request.id: watched.alone(request) for request in requests}
    expected = dict(watched.logits)
    watched.logits.clear()
    guesses = Guesses(alone)
    assert drive(watched.engine, requests, drafts=guesses)[0] == list(alone.values())
    assert guesses.num_accepted > 5
    assert_close({key: watched.logits[key] for key in expected}, expected)


def test_any_cut(watched, family):
    tolerance = family.cut.tolerance if family.cut else 0.0
    if tolerance is None:
        pytest.skip(f"pieces end at fixed positions: {family.cut.because}")
    request = watched.request("cut", 40, 3, seed=7)
    whole = watched.engine.submit(request)
    watched.logits.clear()
    watched.store(whole, 1000)
    watched.finish(whole)
    expected = dict(watched.logits)
    for size in CUTS:
        watched.logits.clear()
        cut = watched.engine.submit(request)
        watched.store(cut, size)
        assert watched.finish(cut) == whole.output
        assert_close(watched.logits, expected, tolerance)


def test_embeddings(watched, name, family):
    """In a batch, and in pieces where those may be anywhere."""
    if name == "talkie":
        assert watched.engine.pooler.embedding is None, "its head is a parameter of no layer"
        return
    for pooling in POOLINGS:
        requests = [asked(watched, str(length), length, pooling) for length in JOINS.values()]
        alone = [vectors(watched, [request])[0] for request in requests]
        assert all(map(np.array_equal, vectors(watched, requests), alone))
        if family.cut is None:
            assert all(np.array_equal(vectors(watched, requests[-1:], size)[0], alone[-1]) for size in CUTS)


def test_mlx_lm_says_the_same(watched, name, family):
    request = watched.request("oracle", 20, 8, seed=9)
    watched.logits.clear()
    tokens = watched.alone(request)
    ours = dict(enumerate(watched.logits.values()))
    model, prompt, theirs = zoo_model(name), list(request.prompt), {}
    cache = make_prompt_cache(model)
    if family.steps:
        for token in prompt[:-1]:
            mx.eval(model(mx.array([[token]]), cache=cache))
        prompt = prompt[-1:]
    for index in range(len(tokens)):
        theirs[index] = np.array(model(mx.array([prompt]), cache=cache)[0, -1])
        prompt = [int(theirs[index].argmax())]
        assert prompt == tokens[index : index + 1]
    assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("mode", ["rows", "rows, keys gathered"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3n", "gemma4_text", "gpt_oss", "mimo_v2_flash", "hunyuan", "plamo2"]
)
def test_families_that_could_run_in_several_modes_are_the_same_in_all(name, mode):
    """Shared keys, windows and sinks, in modes that the probe did not have to try."""
    alone, rows = zoo_engine(name, "alone"), zoo_engine(name, mode)
    requests = {step: alone.request(f"{step}", length, 8, seed=step) for step, length in JOINS.items()}
    alone.logits.clear()
    tokens = [alone.alone(request) for request in requests.values()]
    rows.logits.clear()
    assert [row.output for row in rows.together(requests)] == tokens
    assert_close(rows.logits, alone.logits, 1e-5)


@pytest.mark.parametrize("name", ["gemma3n", "mimo_v2_flash", "recurrent_gemma", "baichuan_m1", "gear"])
def test_windows_hold_where_storage_has_moved_its_keys(name):
    """Beyond the 256 tokens of a buffer, which a window's layer fills again from the front."""
    alone, watched = zoo_engine(name, "alone"), zoo_engine(name)
    request = watched.request("long", 280, 6, seed=11)
    alone.logits.clear()
    tokens = alone.alone(request)
    for size in (100, 255, 1000):
        watched.logits.clear()
        row = watched.engine.submit(request)
        watched.store(row, size)
        assert watched.finish(row) == tokens
        assert_close(watched.logits, alone.logits, 1e-5)


@pytest.mark.parametrize("mode", [None, "rows, keys gathered"])
@pytest.mark.parametrize("name", ["llama", "gemma3n", "gpt_oss", "mimo_v2_flash", "plamo2"])
def test_rows_are_their_own_whatever_their_keys_are_rounded_to(name, mode):
    """Every key is read back from storage, the newest too, in every mode."""
    watched = zoo_engine(name, mode, "float16")
    assert "cache: keys and values as float16" in watched.engine.notes
    requests = {step: watched.request(f"{step}", length, 8, seed=step) for step, length in JOINS.items()}
    watched.logits.clear()
    tokens = [watched.alone(request) for request in requests.values()]
    expected = dict(watched.logits)
    exact = zoo_engine(name, mode)
    exact.logits.clear()
    for request in requests.values():
        exact.alone(request)
    assert any(not np.array_equal(exact.logits[key], row) for key, row in expected.items())
    for piece in (1000,) if ZOO[name].cut else (1000, 7):
        watched.logits.clear()
        assert [row.output for row in watched.together(requests, piece)] == tokens
        assert_close(watched.logits, expected)
