"""When several tokens a step pay, by what rounds cost and give."""

import pytest

from engine.speculate.governor import NUM_CONFIRMATIONS, NUM_SKIPPED, Costs, Evidence, Governor, Track

DEAR = {1: 1.0, 8: 8.0}  # as many tokens cost as many steps
CHEAP = {1: 1.0, 8: 2.0}


def governor(costs: dict[int, float], overall: Evidence | None = None) -> Governor:
    return Governor(Costs(costs), Costs(costs), None if overall is None else {0: overall})


def rounds(judge: Governor, row: Track, *accepted: int) -> None:
    for count in accepted:
        judge.verified(row, 7, count)


def shadowed(judge: Governor, row: Track, accepted: int, num_drafted: int = 7) -> None:
    """What is watched comes true for so many tokens."""
    proposal = tuple(range(num_drafted))
    judge.watch(row, proposal)
    judge.watched(row, [*proposal[:accepted], *([99] if accepted < num_drafted else [])], 1)
    assert not row.shadow


def test_a_width_between_two_that_were_measured():
    assert Costs({1: 1.0, 5: 3.0}).of(3) == 2.0


def test_the_first_times_of_a_width_record_its_step():
    costs = Costs()
    for seconds in (9.0,) * NUM_SKIPPED:
        costs.measured(2, seconds)
    assert costs.table() == {}
    for seconds in (1.0, 50.0, 2.0):
        costs.measured(2, seconds)
    assert costs.table() == {2: 2.0}


def test_what_was_measured_replaces_what_was_known():
    costs = Costs({2: 7.0})
    for seconds in (1.0,) * (NUM_SKIPPED + 1):
        costs.measured(2, seconds)
    assert costs.of(2) == 1.0


def test_rounds_cost_what_steps_do_until_they_are_measured():
    plain = Costs({1: 2.0, 8: 4.0})
    assert Costs(like=plain).of(8) == 4.0
    assert Costs({8: 6.0}, plain).of(8) == 6.0


@pytest.mark.parametrize(("costs", "pays"), [(CHEAP, True), (DEAR, False)], ids=["cheap", "dear"])
def test_break_even(costs, pays):
    judge, row = governor(costs), Track()
    rounds(judge, row, 4, 4, 4, 4)
    assert (judge.width(row, 7, 1) > 0) == pays
    assert row.is_paused != pays


def test_others_in_the_step_wait_for_a_round():
    """What pays for a row alone need not pay beside three others, whose tokens are as late."""
    judge = governor({1: 1.0, 4: 1.1, 5: 1.6, 11: 6.0, 2: 1.2, 8: 1.8})
    alone, beside = Track(), Track()
    for row in (alone, beside):
        rounds(judge, row, 1, 1, 1, 1)
    assert judge.width(alone, 7, 1) > 0
    assert judge.width(beside, 7, 4) == 0


def test_the_width_is_that_which_gives_most():
    """Half of the draft tokens are accepted: many of them cost more than they give."""
    judge, row = governor({1: 1.0, 2: 1.1, 3: 1.2, 8: 3.0}), Track()
    rounds(judge, row, *[1] * 10)
    assert 1 <= judge.width(row, 7, 1) <= 2
    rounds(judge, row, *[7] * 20)
    assert judge.width(row, 7, 1) == 7


def test_one_miss_after_strong_evidence_does_not_pause():
    judge, row = governor(CHEAP), Track()
    rounds(judge, row, 7, 7, 7, 7, 0)
    assert judge.width(row, 7, 1) > 0


def test_misses_pause():
    judge, row = governor(CHEAP), Track()
    rounds(judge, row, 0, 0, 0)
    assert judge.width(row, 7, 1) == 0
    assert row.is_paused
    assert judge.num_pauses == 1


def test_a_paused_row_resumes_after_confirmations():
    judge, row = governor(CHEAP), Track()
    rounds(judge, row, 0, 0, 0)
    judge.width(row, 7, 1)
    for _ in range(NUM_CONFIRMATIONS):
        assert row.is_paused
        shadowed(judge, row, 7)
    assert judge.width(row, 7, 1) > 0


def test_confirmations_are_in_a_row():
    judge, row = governor(CHEAP), Track()
    rounds(judge, row, 0, 0, 0)
    judge.width(row, 7, 1)
    for accepted in (7, 0, 7, 0):
        shadowed(judge, row, accepted)
    assert row.is_paused


def test_tokens_behind_a_miss_are_not_held_against_what_was_watched():
    judge, row = governor(CHEAP), Track()
    judge.watch(row, (1, 2, 3))
    judge.watched(row, [1, 9, 3], 1)
    assert row.evidence.accepted == 1
    assert row.evidence.wrong == 1


def test_a_new_row_begins_with_what_others_have_shown():
    good, bad = (governor(CHEAP, Evidence(*seen)) for seen in ((40, 2), (1, 40)))
    assert good.width(Track(), 7, 1) > 0
    assert bad.width(Track(), 7, 1) == 0


def test_nothing_is_verified_before_a_plain_step_was_measured():
    """Else there is nothing to hold a round against, and whoever always drafts never finds out."""
    plain = Costs()
    judge, track = Governor(plain, Costs({2: 0.02, 8: 0.02}, plain)), Track()
    assert judge.width(track, 7, 1) == 0
    assert not track.is_paused
    for _ in range(NUM_SKIPPED + 1):
        plain.measured(1, 0.015)
    rounds(judge, track, 7)
    assert judge.width(track, 7, 1) > 0


def test_what_a_draft_costs_is_guessed_until_rounds_are_measured():
    plain = Costs({1: 1.0, 8: 1.7})
    judge = Governor(plain, Costs(like=plain), draft_cost=0.9)
    assert not judge.could_pay(7, 1)
    judge.rounds._seconds = {8: 2.0}
    assert judge.could_pay(7, 1)
