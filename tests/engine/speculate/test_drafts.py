"""Who brings draft tokens to a step: turns, bounds, and rows that bring none."""

import itertools
import logging

import pytest

from engine.plan import Draft, Tick
from engine.request import Grammar, Request, Row, Sampling
from engine.speculate.drafts import LOOK_TOKENS, LOOKED_AT, OLD_STEPS, ModelDrafts, PromptLookup
from engine.speculate.governor import Costs, Evidence, Governor
from engine.speculate.lookup import KINDS

CIRCLE = (1, 2, 3, 4) * 5  # the end of it came before


def row(prompt=CIRCLE, *, limit=100, **request) -> Row:
    return Row(Request("asked", tuple(prompt), **request), limit, 0, None)


def governor(*, dear: bool = False) -> Governor:
    costs = Costs({1: 1.0, 64: 64.0 if dear else 1.0})
    return Governor(costs, costs, guesses=[guess for _, guess in KINDS])


def model_governor():
    """Costs that only much right makes up for, and nothing was right so far."""
    costs = Costs({1: 1.0, 64: 57.0})
    return Governor(costs, costs, {0: Evidence(0, 20)})


def lookup(*, block_size=7, max_rows=4, dear=False) -> PromptLookup:
    return PromptLookup(governor(dear=dear), block_size=block_size, max_rows=max_rows)


def asked(drafts, rows):
    return drafts.of(rows, num_running=len(rows))


def test_what_followed_before_is_drafted():
    one = row()
    assert asked(lookup(), [one]) == (Draft(one, 7, (1, 2, 3, 4, 1, 2, 3)),)


def test_the_answer_is_looked_through_as_well():
    drafts, one = lookup(), row((9, 8, 7))
    assert asked(drafts, [one]) == ()
    one.output += [5, 6, 5, 6]
    assert asked(drafts, [one])[0].tokens == (5, 6, 5, 6, 5, 6, 5)


def test_all_rows_together_bring_one_block_and_take_turns():
    drafts, rows = lookup(), [row() for _ in range(3)]
    first = [asked(drafts, rows) for _ in range(6)]
    assert all(sum(draft.num_tokens for draft in step) == 7 for step in first)
    assert [step[0].row for step in first] == [*rows, *rows]


def test_what_one_row_leaves_of_the_block_is_for_the_next():
    short, long = row(limit=4), row()
    assert [(d.row, d.num_tokens) for d in asked(lookup(), [short, long])] == [(short, 3), (long, 4)]


@pytest.mark.parametrize(("num_output", "num_drafted"), [(0, 7), (92, 7), (93, 6), (98, 1), (99, 0)])
def test_no_more_than_the_row_may_still_say(num_output, num_drafted):
    one = row()
    one.output += [CIRCLE[i % 4] for i in range(num_output)]
    assert sum(draft.num_tokens for draft in asked(lookup(), [one])) == num_drafted


def test_many_rows_at_once_draft_nothing():
    rows = [row() for _ in range(3)]
    drafts = lookup(max_rows=2)
    assert drafts.of(rows[:2], num_running=3) == ()
    assert drafts.of(rows[:2], num_running=2)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"grammar": Grammar("regex", "a")}, "held to a grammar"),
        ({"sampling": Sampling(temperature=1.0, mirostat=2)}, "mirostat"),
    ],
    ids=["grammar", "mirostat"],
)
def test_rows_that_take_one_token_say_why(request_, why, caplog):
    drafts, one = lookup(), row(**request_)
    with caplog.at_level(logging.DEBUG):
        assert asked(drafts, [one]) == asked(drafts, [one]) == ()
    assert [why in record.message for record in caplog.records] == [True]


def test_forced_tokens_are_not_drafted():
    one = row()
    one.forced = (3,)
    assert asked(lookup(), [one]) == ()


def test_a_paused_row_is_watched_and_drafts_again():
    drafts, one = lookup(), row((*CIRCLE, 3, 9, 1))
    judge = drafts.governor
    drafts.of([one], num_running=1)
    track = drafts._rows[one].tracks[-1]
    track.is_paused = True
    one.output += CIRCLE
    assert asked(drafts, [one]) == ()
    assert track.shadow
    for _ in range(2):
        tokens = list(track.shadow)
        one.output += tokens
        drafts.settled(one, 0, tokens, 1)
        asked(drafts, [one])
    assert not track.is_paused
    assert judge.num_pauses == 0


def test_short_matches_that_mislead_do_not_pause_long_ones():
    drafts, one = lookup(), row((*CIRCLE, 7, 1, 2))
    drafts.governor.plain._seconds = {1: 1.0, 64: 22.0}
    while not drafts._rows or not drafts._rows[one].tracks[0].is_paused:
        [draft] = asked(drafts, [one]) or [None]
        if draft:
            drafts.settled(one, draft.num_tokens, [99], 1)
    one.output += CIRCLE
    assert asked(drafts, [one])


def test_rounds_are_counted():
    drafts, one = lookup(), row()
    drafts.of([one], num_running=1)
    drafts.settled(one, 7, [1, 2, 3], 1)
    stats = drafts.stats()
    assert (stats.rounds, stats.proposed, stats.accepted, stats.mean_accepted) == (1, 7, 2, 2.0)


def test_steps_are_measured_by_what_was_in_them():
    """What is only looked at is no step of its own, and a draft model may have said less than it was asked."""
    drafts, one = lookup(), row()
    judge = drafts.governor = Governor(Costs(), Costs())
    for drafted, asked_for in ((0, ()), (3, (Draft(one, 7),)), (0, (Draft(one, 7, verified=False),))):
        one.num_drafted = drafted
        for _ in range(9):
            drafts.measured(Tick(decode=(one,), drafts=asked_for), 1.0 + drafted)
    assert judge.plain.table() == {1: 1.0}
    assert judge.rounds.table() == {4: 4.0}


def test_what_rounds_cost_grows_old():
    """Measured while the machine was busy, it might keep rows paused for ever."""
    drafts, one = lookup(), row()
    judge = drafts.governor = Governor(Costs({1: 1.0}), Costs({8: 100.0}))
    for _ in range(OLD_STEPS - 1):
        drafts.measured(Tick(decode=(one,)), 1.0)
    assert judge.rounds.is_known
    drafts.measured(Tick(decode=(one,)), 1.0)
    assert not judge.rounds.is_known


def test_ended_rows_are_forgotten():
    drafts, one = lookup(), row()
    asked(drafts, [one])
    drafts.forget(one)
    drafts.settled(one, 7, [1], 1)
    assert not drafts._rows


def test_a_draft_model_is_looked_at_less_and_less_where_it_does_not_pay():
    drafts = ModelDrafts(model_governor(), block_size=7)
    one = row(limit=10_000)
    looked = []
    for _ in range(1000):
        one.num_drafted = 0
        for draft in asked(drafts, [one]):
            assert draft == Draft(one, LOOKED_AT, verified=False)
            one.looked_at = (7,) * LOOKED_AT
            looked.append(len(one.output))
        one.output.append(1)
        drafts.settled(one, 0, [1], 1)
        assert one.looked_at == ()
    assert looked[0] == LOOK_TOKENS
    assert [b - a for a, b in itertools.pairwise(looked)] == [32, 64, 128, 256]
    assert one.drafts.pauses == 1


def test_a_draft_model_that_could_never_pay_is_not_looked_at():
    dear = Costs({1: 1.0, 64: 64.0})
    drafts, one = ModelDrafts(Governor(dear, dear), block_size=7), row(limit=10_000)
    for _ in range(500):
        assert asked(drafts, [one]) == ()
        one.output.append(1)
        drafts.settled(one, 0, [1], 1)


def test_a_draft_model_that_comes_to_pay_drafts_again():
    judge = model_governor()
    drafts, one = ModelDrafts(judge, block_size=7), row(limit=10_000)
    asked(drafts, [one])
    judge.plain._seconds = judge.rounds._seconds = {1: 1.0, 64: 1.5}
    while one.drafts.rounds == 0 and len(one.output) < 500:
        step = asked(drafts, [one])
        if step and step[0].verified:
            return
        one.looked_at = (1,) * LOOKED_AT if step else ()
        one.output.append(1)
        drafts.settled(one, 0, [1], 1)
    pytest.fail("it never drafted again")


def test_the_policy_says_what_pays():
    drafts = lookup(block_size=3)
    policy = drafts.policy()
    assert policy.kind == "prompt-lookup"
    assert [verdict.num_same for verdict in policy.verdicts] == [num_same for num_same, _ in KINDS]
    for cheap, dear in zip(policy.verdicts, lookup(dear=True).policy().verdicts, strict=True):
        assert [verdict.width for verdict in cheap.widths] == [1, 2, 3]
        assert all(verdict.pays for verdict in cheap.widths)
        assert not any(verdict.pays for verdict in dear.widths)
