"""The prefill plan: pieces cover a prompt once and in order, within the size in force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import ALONE_MAX_TOKENS, GRID_TOKENS, SHARED_MAX_TOKENS, PrefillPlan
from engine.request import Request, Row


def row(num_tokens, cursor=0):
    return Row(Request("r", (1,) * num_tokens), 10, 0, None, cursor=cursor)


def cuts(plan, num_tokens, decoding=False):
    one, stops = row(num_tokens), []
    while not one.prefilled:
        (piece,) = plan.pieces([one], decoding=decoding)
        assert piece.start == one.cursor
        one.cursor = piece.stop
        stops.append(piece.stop)
        assert piece.is_last == one.prefilled
    return stops


@given(num_tokens=st.integers(1, 3000), size=st.integers(1, 700))
def test_pieces_of_a_given_size_cover_the_prompt(num_tokens, size):
    stops = cuts(PrefillPlan(fixed_tokens=size), num_tokens)
    assert stops[-1] == num_tokens
    assert all(b - a <= size for a, b in zip([0, *stops], stops, strict=False))


@pytest.mark.parametrize(
    ("rate", "alone", "shared"), [(0, 16, 16), (100, 96, 16), (1000, 992, 240), (1e6, 2048, 512)]
)
def test_pieces_are_sized_by_time_in_multiples_of_16(rate, alone, shared):
    plan = PrefillPlan(tokens_per_s=rate)
    assert plan.budget(decoding=False) == alone <= ALONE_MAX_TOKENS
    assert plan.budget(decoding=True) == shared <= SHARED_MAX_TOKENS


def test_the_measured_rate_moves_the_size():
    plan = PrefillPlan()
    plan.measured(64, 0.1)
    assert plan.budget(decoding=False) == 640
    plan.measured(64, 0.0)
    assert plan.budget(decoding=False) == 640


def test_on_a_grid_pieces_end_at_fixed_positions_whatever_runs():
    plan = PrefillPlan(on_grid=True, tokens_per_s=1e6)
    for decoding in (False, True):
        assert cuts(plan, 600, decoding) == [GRID_TOKENS, 2 * GRID_TOKENS, 600]


def test_several_prompts_share_the_piece_in_force():
    plan = PrefillPlan(fixed_tokens=64)
    pieces = plan.pieces([row(40), row(30), row(20)], decoding=False)
    assert [(p.start, p.stop) for p in pieces] == [(0, 40), (0, 20)]
    assert sum(p.num_tokens for p in pieces) <= 64


def test_a_long_prompt_takes_the_whole_piece():
    assert [p.stop for p in PrefillPlan(fixed_tokens=64).pieces([row(100), row(10)], decoding=False)] == [64]
