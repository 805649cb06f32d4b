"""Submitting a step before the last one is read changes no token."""

import pytest

from engine.plan import PrefillPlan
from tests.engines import Watched
from tests.tiny import write_checkpoint

JOINS = {1: 3, 2: 9, 9: 40}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mamba2"])
def pair(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Watched(folder, lookahead=False), Watched(folder, lookahead=True)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_same_tokens_either_way(pair, sampling):
    outputs = []
    for watched in pair:
        requests = {
            step: watched.request(f"{step}", length, 5 + 3 * step, seed=step, **sampling)
            for step, length in JOINS.items()
        }
        outputs.append([row.output for row in watched.together(requests)])
        assert watched.engine._in_flight is None
    assert outputs[0] == outputs[1]


def test_same_tokens_when_prompts_share_steps_with_decode_rows(pair):
    outputs = []
    for watched in pair:
        requests = [watched.request(f"{i}", length, 14, seed=i) for i, length in enumerate((3, 50, 9, 70))]
        on_grid = watched.engine.mode != "spans"
        plan = PrefillPlan(fixed_tokens=16, on_grid=on_grid, mixed_tokens=20)
        rows, ticks = watched.scheduled(requests, plan)
        outputs.append([row.output for row in rows])
        assert any(tick.prefill and tick.decode for tick in ticks) != on_grid
    assert outputs[0] == outputs[1]


def test_a_row_that_ends_drops_its_token_in_flight(pair):
    """An end of sequence is seen one step late: the token behind it is never shown."""
    plain, ahead = pair
    free = plain.request("r", 6, 20, seed=5)
    tokens = plain.alone(free)
    for watched in pair:
        watched.engine._finish._end_tokens = frozenset({tokens[4]})
    stopping = type(free)("r", free.prompt, free.sampling, 20)
    assert plain.alone(stopping) == ahead.alone(stopping) == tokens[: tokens.index(tokens[4]) + 1]


def test_a_cancelled_row_leaves_the_others_alone(pair):
    _, ahead = pair
    kept, dropped = (ahead.request(name, 5, 12, seed=i) for i, name in enumerate("kd"))
    expected = ahead.alone(kept)
    rows = [ahead.engine.submit(request) for request in (kept, dropped)]
    for row in rows:
        ahead.store(row, 100)
    for _ in range(3):
        ahead.engine.step(rows)
    rows[1].finish_reason = "cancelled"
    ahead.engine.release(rows[1])
    assert ahead.finish(rows[0]) == expected
    assert len(rows[1].output) < 12
