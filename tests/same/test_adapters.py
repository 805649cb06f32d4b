"""Rows with adapters of their own in one batch: each is what it is alone, whoever runs beside it."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_adapters, load_model

from engine.kernels import leaves
from engine.plan import Piece, PrefillPlan, Tick
from engine.request import Request
from tests.adapters import write_adapter
from tests.engines import BACKENDS, Guesses, Watched, drive
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
# Plain and sliding attention, sinks and experts, latent attention, in spans; states and hybrids; what runs alone.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v2", "mamba2", "qwen3_next", "jamba", "gemma2")
ARMS = ["portable", *(BACKENDS if "paged" in BACKENDS else [])]


TWO = {"a": {"rank": 4, "seed": 1}, "b": {"rank": 7, "seed": 2, "dora": True}}


def opened(tmp_path, arm, name="llama", adapters=None, **config):
    """The zoo's model in one of the ways to run it, with two adapters of other ranks and kinds mounted."""
    model = zoo_model(name)
    adapters = TWO if adapters is None else adapters
    folders = {key: write_adapter(tmp_path / key, model, **how) for key, how in adapters.items()}
    if arm != "portable":
        leaves.replace(model)
    backend = "paged" if arm == "paged" and ZOO[name].mode == "spans" else "dense"
    watched = Watched(
        zoo_loaded(model), mode=ZOO[name].mode, **{"parallel": 4, "decode_storage_backend": backend, **config}
    )
    for key, folder in folders.items():
        watched.engine.adapters.mount(key, folder)
    return watched


def of(request: Request, adapter: str) -> Request:
    return dataclasses.replace(request, id=f"{request.id}, {adapter or 'base'}", adapter=adapter)


def mixed(watched, num_new=20, **sampling):
    """Rows without an adapter and with one of two, some of the same prompt; each joins a step after the last."""
    adapters = ["a", "", "b", "a", ""]
    lengths = [9, 9, 9, 23, 40]
    return {
        step: of(watched.request(f"row {step}", length, num_new, seed=step, **sampling), adapter)
        for step, (length, adapter) in enumerate(zip(lengths, adapters, strict=True), start=1)
    }


def alone_and_logits(watched, requests):
    alone = {}
    for request in requests:
        watched.logits.clear()
        alone[request.id] = watched.alone(request), dict(watched.logits)
    watched.logits.clear()
    return alone


def assert_rows(watched, rows, alone, *, exact=True):
    for row in rows:
        tokens, logits = alone[row.request.id]
        assert row.output == tokens
        for key, expected in logits.items():
            if exact:
                assert np.array_equal(watched.logits[key], expected)
            else:
                np.testing.assert_allclose(watched.logits[key], expected, atol=1e-4 * np.abs(expected).max())


@pytest.fixture(params=ARMS)
def watched(request, tmp_path):
    return opened(tmp_path, request.param)


@pytest.mark.parametrize("sampling", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("piece", [1000, 7])
def test_rows_of_several_adapters_are_each_what_they_are_alone(watched, sampling, piece):
    requests = mixed(watched, **sampling)
    alone = alone_and_logits(watched, requests.values())
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(requests)
    exact = leaves.is_compiled(watched.engine.adapters._layers["model.layers.0.self_attn.q_proj"])
    assert_rows(watched, watched.together(requests, piece), alone, exact=exact)
    recorded = watched.engine._forward._recorded
    assert recorded is None or recorded.reason is None


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path, name, arm):
    watched = opened(tmp_path, arm, name)
    requests = mixed(watched, 8)
    alone = alone_and_logits(watched, requests.values())
    exact = arm != "portable" and ZOO[name].mode == "spans"
    assert_rows(watched, watched.together(requests), alone, exact=exact)


def test_rows_of_one_adapter_batch(watched):
    requests = {step: of(watched.request(f"row {step}", 5 * step, 12, seed=step), "b") for step in (1, 2, 3)}
    alone = alone_and_logits(watched, requests.values())
    exact = leaves.is_compiled(watched.engine.adapters._layers["model.layers.0.self_attn.q_proj"])
    assert_rows(watched, watched.together(requests), alone, exact=exact)


@pytest.mark.parametrize("arm", ARMS)
def test_rows_without_an_adapter_are_what_they_are_where_none_is_mounted(tmp_path, arm):
    plain, beside = opened(tmp_path, arm, adapters={}), opened(tmp_path, arm)
    requests = {step: request for step, request in mixed(beside).items() if not request.adapter}
    expected = alone_and_logits(plain, requests.values())
    rows = beside.together(mixed(beside))
    assert_rows(beside, [row for row in rows if not row.request.adapter], expected)


@pytest.mark.parametrize("arm", ARMS[1:])
def test_what_else_is_mounted_changes_nothing(tmp_path, arm):
    """A larger rank beside it pads an adapter's factors, another's magnitudes are ones for it."""
    one = opened(tmp_path, arm, adapters={"a": {"rank": 4}})
    two = opened(tmp_path, arm, adapters={"z": {"rank": 33, "dora": True, "seed": 3}, "a": {"rank": 4}})
    requests = {step: request for step, request in mixed(one).items() if request.adapter != "b"}
    expected = alone_and_logits(one, requests.values())
    for request in requests.values():
        two.logits.clear()
        assert two.alone(request) == expected[request.id][0]
        assert all(np.array_equal(two.logits[key], row) for key, row in expected[request.id][1].items())


@pytest.mark.parametrize("arm", ARMS)
def test_prompts_of_several_adapters_in_one_forward(tmp_path, arm):
    watched = opened(tmp_path, arm)
    lengths = {"a": 11, "": 20, "b": 29}
    requests = [of(watched.request("row", length, 5, seed=length), name) for name, length in lengths.items()]
    alone = alone_and_logits(watched, requests)
    rows = [watched.engine.submit(request) for request in requests]
    pieces = PrefillPlan(fixed_tokens=100).pieces(rows, decoding=False)
    assert len(pieces) == len(rows)
    watched.engine.prefill(pieces)
    for row in rows:
        watched.finish(row)
    assert_rows(watched, rows, alone, exact=arm != "portable")


@pytest.mark.parametrize("arm", ARMS[1:])
@pytest.mark.parametrize("cut", [1, 16, 30])
def test_a_prompt_that_is_cut_is_the_whole_prompt(tmp_path, arm, cut):
    watched = opened(tmp_path, arm)
    request = of(watched.request("row", 50, 6), "b")
    [(tokens, logits)] = alone_and_logits(watched, [request]).values()
    row = watched.engine.submit(request)
    watched.engine.prefill([Piece(row, 0, cut)])
    watched.engine.prefill([Piece(row, cut, 50)])
    assert watched.finish(row) == tokens
    assert all(np.array_equal(watched.logits[key], expected) for key, expected in logits.items())


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_is_kept_of_a_prompt_is_its_adapters_own(tmp_path, arm, name):
    cold = opened(tmp_path, arm, name)
    warm = opened(tmp_path, arm, name, no_prompt_cache=False, verify_cache=1.0)
    requests = [of(cold.request("row", 50, 6), adapter) for adapter in ("", "a", "b")]
    requests = [dataclasses.replace(request, boundaries=(32, 50)) for request in requests]
    alone = alone_and_logits(cold, requests)
    for cached in (False, True):
        for request in requests:
            [tokens], [row] = drive(warm.engine, [dataclasses.replace(request)])
            assert tokens == alone[request.id][0]
            assert bool(row.num_cached) == cached
    while warm.engine.verifier.has_work:
        warm.engine.verifier.advance()
    stats = warm.engine.cache_stats()
    assert (stats.verify_checked, stats.verify_different) == (3, 0)


def test_a_name_that_is_mounted_again_reuses_nothing_of_before(tmp_path):
    warm = opened(tmp_path, ARMS[-1], no_prompt_cache=False)
    request = of(warm.request("row", 50, 6), "a")
    drive(warm.engine, [request])
    other = write_adapter(tmp_path / "other", zoo_model("llama"), seed=9)
    warm.engine.adapters.unmount("a")
    warm.engine.adapters.settle(())
    warm.engine.adapters.mount("a", other)
    cold = opened(tmp_path, ARMS[-1], adapters={})
    cold.engine.adapters.mount("a", other)
    [tokens], [row] = drive(warm.engine, [request])
    assert not row.num_cached
    assert tokens == cold.alone(request)


@pytest.mark.parametrize("arm", ARMS)
def test_rows_that_draft(tmp_path, arm):
    watched = opened(tmp_path, arm)
    lengths = {"b": 5, "": 14, "a": 23}
    requests = [of(watched.request("row", n, 24, seed=n, **DRAWN), name) for name, n in lengths.items()]
    alone = {request.id: watched.alone(request) for request in requests}
    guesses = Guesses(alone)
    outputs, _ = drive(watched.engine, requests, drafts=guesses)
    assert outputs == list(alone.values())
    assert guesses.num_accepted > 10


@pytest.mark.parametrize("arm", ARMS[1:])
def test_a_row_that_was_preempted(tmp_path, arm):
    watched = opened(tmp_path, arm)
    requests = [of(watched.request("row", 20, 12, seed=seed), name) for seed, name in enumerate(("a", "b"))]
    alone = alone_and_logits(watched, requests)
    rows = [watched.engine.submit(request) for request in requests]
    for row in rows:
        watched.store(row, 100)
    for _ in range(3):
        watched.engine.step(rows)
    watched.engine.run(Tick(preempt=(rows[1],)))
    watched.engine.step(rows[:1])
    watched.engine.prefill([Piece(rows[1], 0, len(rows[1].prefill_tokens))])
    for row in rows:
        watched.finish(row)
    assert_rows(watched, rows, alone)


@pytest.mark.parametrize("how", [{}, {"dora": True}, {"peft": True}, {"peft": True, "dora": True}], ids=str)
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_what_a_row_computes_is_what_mlx_lm_computes(tmp_path, how, bits, dtype):
    """With the same factors in mlx-lm's own layers, over the weights as the engine has them."""
    model, _ = load_model(write_checkpoint(tmp_path / "base", "llama"))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    adapter = write_adapter(tmp_path / "mlx", model, dtype=dtype, **{**how, "peft": False})
    written = write_adapter(tmp_path / "as written", model, dtype=dtype, **how)
    watched = Watched(zoo_loaded(model), mode="spans")
    watched.engine.adapters.mount("a", written)
    request = of(watched.request("row", 9, 1), "a")
    watched.alone(request)
    [computed] = watched.logits.values()
    reference, _ = load_model(tmp_path / "base")
    if bits:
        nn.quantize(reference, group_size=32, bits=bits)
    load_adapters(reference, str(adapter))
    expected = np.array(reference(mx.array([request.prompt]))[0, -1].astype(mx.float32))
    # Factors in half precision it multiplies so, and here they are float32.
    allowed = 3e-4 if dtype == mx.float32 else 5e-3
    np.testing.assert_allclose(computed, expected, atol=allowed * np.abs(expected).max())
    plain, _ = load_model(tmp_path / "base")
    assert np.abs(np.array(plain(mx.array([request.prompt]))[0, -1]) - expected).max() > 0.1


@pytest.mark.real
def test_two_adapters_on_a_real_model(real_checkpoint, tmp_path):
    watched = Watched(real_checkpoint, parallel=4)
    model = watched.engine.adapters.model
    for seed, name in enumerate(("first", "second")):
        folder = write_adapter(tmp_path / name, model, rank=8, seed=seed, size=0.02)
        watched.engine.adapters.mount(name, folder)
    requests = {
        step: of(watched.request(f"row {step}", 7 + step, 6, seed=step), name)
        for step, name in enumerate(("first", "", "second", "first"), start=1)
    }
    alone = alone_and_logits(watched, requests.values())
    assert len({tuple(tokens) for tokens, _ in alone.values()}) >= 3
    assert_rows(watched, watched.together(requests), alone)
