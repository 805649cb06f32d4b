"""A row that is preempted, however often, ends as it does alone: same tokens, and in spans mode the same bits."""

import dataclasses

import numpy as np
import pytest

from engine.size import Bound
from tests.engines import Watched, drive
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

NUM_USERS = 12
PREFIX = 40
# Plain, sliding-window and latent attention; recurrent states, alone and beside attention.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "mamba2", "qwen3_next", "granitemoehybrid")
SAMPLINGS = {"greedy": {}, "drawn": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}}
CHUNK_TOKENS = 256  # the step in which a row's buffers grow


def users(watched, count=NUM_USERS, *, num_new=24, base=3, **sampling):
    """Requests over one prefix, each with a question and a seed of its own."""
    prefix = tuple((7 * i + 3) % 250 for i in range(PREFIX))
    requests = [
        watched.request(str(user), base + 2 * user, num_new + user % 5, seed=user, **sampling) for user in range(count)
    ]
    return [dataclasses.replace(request, prompt=prefix + request.prompt) for request in requests]


def undisturbed(watched, requests):
    watched.logits.clear()
    return [watched.alone(request) for request in requests], dict(watched.logits)


def assert_same(watched, requests, **options):
    """Run `requests` together; the rows, of which some were preempted."""
    expected, logits = undisturbed(watched, requests)
    watched.logits.clear()
    outputs, rows = drive(watched.engine, requests, **options)
    assert outputs == expected
    assert sum(row.num_preempted for row in rows) > 0
    if watched.engine.mode == "spans":
        assert watched.logits.keys() == logits.keys()
        assert all(np.array_equal(watched.logits[key], logits[key]) for key in logits)
    return rows


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cached"])
@pytest.mark.parametrize("name", FAMILIES)
def test_users_over_one_prefix_in_a_context_too_small_for_them(name, cached, sampling):
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        ctx_size=4 * (PREFIX + 30),
        cache_dtype="float32",
        no_prompt_cache=not cached,
    )
    rows = assert_same(watched, users(watched, **sampling))
    assert all(row.num_cached <= len(row.request.prompt) for row in rows)


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cached"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_users_in_memory_too_small_for_them(name, cached):
    """Buffers grow in steps, so rows that are about to need the next one meet the budget together."""
    probe = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, cache_dtype="float32")
    one, two = probe.engine.memory._row_bytes(10), probe.engine.memory._row_bytes(300)
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        kv_cache_budget=Bound(3 * one + 2 * (two - one)),
        cache_dtype="float32",
        no_prompt_cache=not cached,
    )
    assert_same(watched, users(watched, 5, num_new=16, base=153))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_with_a_step_in_flight(family, tmp_path):
    """Nobody is preempted whom an unread step still holds; the token of that step is not lost and not given twice."""
    watched = Watched(write_checkpoint(tmp_path, family), ctx_size=4 * (PREFIX + 30), lookahead=True)
    assert_same(watched, users(watched))
    assert watched.engine._in_flight is None


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_for_a_row_of_higher_priority(name):
    watched = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, ctx_size=200)
    low, high = users(watched, 2, num_new=60)
    late = dataclasses.replace(high, priority="high", id="late")
    expected, _ = undisturbed(watched, [low, late])

    outputs, rows = drive(watched.engine, [dataclasses.replace(low, priority="low"), late], preempts=True)
    assert outputs == expected
    assert len(rows) == 2
