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


def users(watched, count=NUM_USERS, *, num_new=16, base=3, **sampling):
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
    """Run `requests` together and each alone; some are preempted."""
    expected, logits = undisturbed(watched, requests)
    watched.logits.clear()
    outputs, rows = drive(watched.engine, requests, **options)
    assert outputs == expected
    assert sum(row.num_preempted for row in rows) > 0
    if watched.engine.mode == "spans":
        assert watched.logits.keys() == logits.keys()
        assert all(np.array_equal(watched.logits[key], logits[key]) for key in logits)


@pytest.mark.parametrize(("sampling", "cached"), [("greedy", False), ("drawn", True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_users_over_one_prefix_in_a_context_too_small_for_them(name, cached, sampling):
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        ctx_size=4 * (PREFIX + 24),
        no_prompt_cache=not cached,
    )
    assert_same(watched, users(watched, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cached"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_users_in_memory_too_small_for_them(name, cached):
    """Buffers grow in steps, so rows that are about to need the next one meet the budget together."""
    probe = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode)
    one, two = probe.engine.memory._row_bytes(10), probe.engine.memory._row_bytes(300)
    watched = Watched(
        zoo_loaded(zoo_model(name)),
        mode=ZOO[name].mode,
        kv_cache_budget=Bound(3 * one + 2 * (two - one)),
        no_prompt_cache=not cached,
    )
    assert_same(watched, users(watched, 5, num_new=16, base=153))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_with_a_step_in_flight(family, tmp_path):
    """Nobody is preempted whom an unread step still holds; the token of that step is not lost and not given twice."""
    watched = Watched(write_checkpoint(tmp_path, family), ctx_size=4 * (PREFIX + 24), lookahead=True)
    assert_same(watched, users(watched))
    assert watched.engine._in_flight is None


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_for_a_row_of_higher_priority(name):
    watched = Watched(zoo_loaded(zoo_model(name)), mode=ZOO[name].mode, ctx_size=150, no_prompt_cache=False)
    low, high = users(watched, 2, num_new=60)
    low, high = dataclasses.replace(low, priority="low"), dataclasses.replace(high, priority="high")
    expected, _ = undisturbed(watched, [low, high])
    late = []

    def arrive(scheduler):
        if not late and len(scheduler.decoding[0].output) == 9:
            late.append(watched.engine.submit(high))
            scheduler.add(late[0])

    outputs, rows = drive(watched.engine, [low], preempts=True, on_tick=arrive)
    assert [*outputs, late[0].output] == expected
    assert (rows[0].num_preempted, late[0].num_preempted) == (1, 0)
