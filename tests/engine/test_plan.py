"""The prefill plan: pieces cover a prompt once and in order, within the size in force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import ALONE_MAX_TOKENS, GRID_TOKENS, SHARED_MAX_TOKENS, PrefillPlan
from engine.request import Request, Row


def row(num_tokens, cursor=0, boundaries=()):
    return Row(Request("r", (1,) * num_tokens, boundaries=boundaries), 10, 0, None, cursor=cursor)


def cuts(plan, num_tokens, decoding=False):
    return cuts_of(plan, row(num_tokens), decoding)


def cuts_of(plan, one, decoding=False):
    stops = []
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
    plan.measured(3, 1.0)
    assert plan.budget(decoding=False) == 640


def test_on_a_grid_pieces_end_at_fixed_positions_whatever_runs():
    plan = PrefillPlan(on_grid=True, tokens_per_s=1e6)
    for decoding in (False, True):
        assert cuts(plan, 600, decoding) == [GRID_TOKENS, 2 * GRID_TOKENS, 600]


def test_on_a_grid_pieces_end_where_turns_begin_too():
    plan = PrefillPlan(on_grid=True)
    one = row(600, boundaries=(10, 256, 300, 600))
    assert cuts_of(plan, one) == [10, 256, 300, 512, 600]
    assert [plan.reproduces(hit, one.request.boundaries) for hit in (0, 10, 11, 256, 300, 512)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip
    assert cuts_of(PrefillPlan(fixed_tokens=400), row(600, boundaries=(10,))) == [400, 600]


def test_pieces_begin_behind_what_can_be_adopted():
    held = {16, 48, 64, 512}
    asked = []

    def longest(row, reproduces):
        asked.append(row)
        return max([n for n in held if n < len(row.request.prompt) and reproduces(n)], default=0)

    plan = PrefillPlan(fixed_tokens=32, held=longest)
    assert [(p.start, p.stop) for p in plan.pieces([row(100)], decoding=False)] == [(64, 96)]
    assert [(p.start, p.stop) for p in plan.pieces([row(100, cursor=80)], decoding=False)] == [(80, 100)]
    grid = PrefillPlan(on_grid=True, held=longest)
    assert grid.piece(row(100), 256).start == 0
    assert grid.piece(row(600), 256).start == 512
    assert grid.piece(row(100, boundaries=(48, 100)), 256).start == 48
    assert len(asked) == 5


def prompts(*requests):
    return [Row(Request("r", tokens, **options), 10, 0, None) for tokens, options in requests]


def test_who_can_take_all_that_another_is_about_to_store_waits_for_it():
    one, two = tuple(range(40)), (*range(30), *range(70, 90))
    turns = {"boundaries": (30, 40)}, {"boundaries": (30, 50)}
    plan = PrefillPlan(on_grid=True, keeps_whole=True)

    def waits(row, *ahead):
        return [plan.waits(other, [row]) for other in ahead]

    first, equal, raw, history, longer = prompts(
        (one, turns[0]),
        (one, turns[0]),
        (one, {}),
        (two, turns[1]),
        ((*one, 7), {"boundaries": (30, 40, 41)}),
    )
    apart = prompts(
        (one, turns[0] | {"cache_salt": "s"}),
        (one, turns[0] | {"cache_prompt": False}),
        (one[:30], {"boundaries": (30,)}),
    )
    assert waits(first, equal, raw, history, longer, *apart) == [True, False, True, True, False, False, False]
    assert waits(raw, *prompts((one, {})), first) == [True, False]
    first.cursor = 30
    assert waits(first, equal, history, longer) == [True, False, True]
    first.cursor = 40
    assert waits(first, equal, longer) == [False, False]
    equal.cursor = 30
    first.cursor = 20
    assert waits(first, equal) == [False]
    assert not PrefillPlan(on_grid=True).waits(longer, [history])
    held = PrefillPlan(on_grid=True, keeps_whole=True, held=lambda row, reproduces: 40)
    first.cursor = 0
    assert not held.waits(longer, [first])


def test_a_prompt_that_is_stored_whole_has_a_piece_of_no_tokens():
    plan = PrefillPlan(on_grid=True, keeps_whole=True, held=lambda row, reproduces: 40)
    pieces = plan.pieces([row(40), row(40), row(50)], decoding=False)
    assert [(piece.start, piece.stop, piece.is_last) for piece in pieces] == [(40, 40, True)] * 2 + [
        (40, 50, True)
    ]


def test_what_is_adopted_takes_nothing_of_the_piece():
    plan = PrefillPlan(fixed_tokens=64, held=lambda row, reproduces: 96)
    pieces = plan.pieces([row(120), row(130), row(100), row(200)], decoding=False)
    assert [(p.start, p.stop) for p in pieces] == [(96, 120), (96, 130), (96, 100)]


def test_several_prompts_share_the_piece_in_force():
    plan = PrefillPlan(fixed_tokens=64)
    pieces = plan.pieces([row(40), row(30), row(20)], decoding=False)
    assert [(p.start, p.stop) for p in pieces] == [(0, 40), (0, 20)]
    assert sum(p.num_tokens for p in pieces) <= 64


def test_a_long_prompt_takes_the_whole_piece():
    assert [p.stop for p in PrefillPlan(fixed_tokens=64).pieces([row(100), row(10)], decoding=False)] == [64]


def test_pieces_are_no_longer_than_their_forward_has_room_for():
    plan = PrefillPlan(fixed_tokens=64, fits=lambda start: 64 if start < 100 else 16)
    assert cuts_of(plan, row(170)) == [64, 128, 144, 160, 170]
    assert cuts_of(PrefillPlan(on_grid=True, fits=lambda start: 16), row(300)) == [256, 300]


def test_a_row_that_starts_over_prefills_what_it_has_said():
    one = row(20)
    one.output += [7, 8, 9]
    one.start_over()
    assert (one.cursor, one.prefilled, one.num_preempted) == (0, False, 1)
    piece = PrefillPlan(fixed_tokens=64).piece(one, 64)
    assert (piece.start, piece.stop, piece.is_last) == (0, 23, True)
    assert one.prefill_tokens[piece.start : piece.stop] == (*one.request.prompt, 7, 8, 9)
    # On the grid the prompt ends in a piece of its own, as it did the first time.
    assert cuts_of(PrefillPlan(on_grid=True), one) == [20, 23]


def at(plan, *rows, **options):
    return [(p.start, p.stop) for p in plan.pieces(list(rows), **{"decoding": False, **options})]


@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_one_forward_takes_so_many_prompts(max_batch):
    plan = PrefillPlan(fixed_tokens=64, max_batch=max_batch)
    assert len(at(plan, *(row(5) for _ in range(4)))) == max_batch


@pytest.mark.parametrize(
    ("max_tokens", "stops"), [(0, [20, 20, 20]), (1000, [20, 20, 20]), (50, [20, 20]), (10, [20])]
)
def test_prompts_together_are_bounded_and_never_above_the_piece_in_force(max_tokens, stops):
    plan = PrefillPlan(fixed_tokens=64, max_batch_tokens=max_tokens)
    assert [stop for _, stop in at(plan, *(row(20) for _ in range(5)))] == stops
    assert at(plan, row(100), row(10)) == [(0, 64)]


@pytest.mark.parametrize(("beside", "stop"), [(0, 64), (1, 31), (15, 17), (16, 16), (100, 16)])
def test_beside_decode_rows_a_piece_is_what_they_leave_of_the_budget(beside, stop):
    plan = PrefillPlan(fixed_tokens=64, mixed_tokens=32)
    assert at(plan, row(100), beside=beside) == [(0, stop)]
    assert at(PrefillPlan(fixed_tokens=8, mixed_tokens=32), row(100), beside=beside) == [(0, 8)]


def prompt(*tokens, **options):
    return Row(Request("r", tokens, **options), 10, 0, None)


SHARED = (7,) * 16


@pytest.mark.parametrize(
    ("one", "other", "joins"),
    [
        (prompt(*SHARED, 1), prompt(*SHARED, 2), False),
        (prompt(*SHARED, 1), prompt(*SHARED, 1), False),
        (prompt(*SHARED), prompt(*SHARED, 2), False),
        (prompt(*SHARED, 1), prompt(*SHARED), True),  # the last token is always computed
        (prompt(*SHARED[:-1], 1), prompt(*SHARED, 2), True),
        (prompt(*SHARED[:-1]), prompt(*SHARED, 2), True),
        (prompt(*SHARED, 1, cache_salt="a"), prompt(*SHARED, 2), True),
        (prompt(*SHARED, 1, cache_salt="a"), prompt(*SHARED, 2, cache_salt="a"), False),
        (prompt(*SHARED, 1, cache_prompt=False), prompt(*SHARED, 2), True),
        (prompt(*SHARED, 1), prompt(*SHARED, 2, cache_prompt=False), True),
    ],
)
def test_what_the_next_forward_could_adopt_does_not_join(one, other, joins):
    stops = [len(one.request.prompt), len(other.request.prompt)]
    for block_tokens in (16, 0):
        plan = PrefillPlan(fixed_tokens=64, block_tokens=block_tokens)
        taken = [stop for _, stop in at(plan, one, other)]
        assert taken == (stops if joins or not block_tokens else stops[:1])


def test_equal_blocks_behind_other_prompts_are_not_shared():
    plan = PrefillPlan(fixed_tokens=64, block_tokens=16)
    rows = [prompt(*(first,) * 16, *SHARED, first) for first in (1, 2)]
    for one in rows:
        one.cursor = 16
    assert at(plan, *rows) == [(16, 33), (16, 33)]


def test_a_further_row_that_shares_nothing_joins_in_front_of_those_that_wait():
    plan = PrefillPlan(fixed_tokens=64, block_tokens=16)
    pieces = plan.pieces([prompt(*SHARED, 1), prompt(*SHARED, 2), prompt(3, 4)], decoding=False)
    assert [piece.num_tokens for piece in pieces] == [17, 2]


def test_on_a_grid_only_what_ends_a_piece_is_waited_for():
    plan = PrefillPlan(on_grid=True, fixed_tokens=32, block_tokens=16)
    assert at(plan, prompt(*SHARED, 1), prompt(*SHARED[:14], 2)) == [(0, 17), (0, 15)]
    assert at(plan, prompt(*SHARED, 1), prompt(*SHARED, 2)) == [(0, 17)]
