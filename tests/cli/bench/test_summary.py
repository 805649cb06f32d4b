"""Percentiles, rates over time, goodput and ratios are what their definitions say."""

import math

import pytest

from engine.errors import UserError
from mlxcel_cli.bench.record import Record
from mlxcel_cli.bench.summary import Objective, Spread, medians, over_time, percentile, ratios, summarize


def answered(due_s: float, *pieces_s: float, ended_s: float | None = None, **usage: int) -> Record:
    ended = pieces_s[-1] if ended_s is None else ended_s
    return Record(due_s, sent_s=due_s, pieces_s=list(pieces_s), ended_s=ended, usage=usage)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.6), (0.99, 4.96), (1.0, 5.0), (0.25, 2.0)], ids=str
)
def test_a_percentile_lies_between_its_neighbours_in_proportion(share, value):
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], share) == pytest.approx(value)


def test_the_percentile_of_one_value_is_that_value():
    assert percentile([7.0], 0.99) == 7.0


def test_a_spread_has_the_ends_of_its_curve():
    spread = Spread.of([3.0, 1.0, 2.0])
    assert spread is not None
    assert (spread.p50, spread.mean, spread.largest) == (2.0, 2.0, 3.0)
    assert (spread.curve[0], spread.curve[50], spread.curve[100]) == (1.0, 2.0, 3.0)
    assert Spread.of([]) is None


def test_what_is_waited_for_counts_from_when_it_was_due():
    record = Record(due_s=1.0, sent_s=3.0, pieces_s=[3.5, 3.7, 4.1], ended_s=4.2)
    assert record.ttft_s == pytest.approx(2.5)
    assert record.e2e_s == pytest.approx(3.2)
    assert record.late_s == pytest.approx(2.0)
    assert record.gaps_s == pytest.approx([0.2, 0.4])
    assert record.token_s == pytest.approx(0.3)


def test_tokens_are_the_servers_count_else_the_pieces():
    assert answered(0.0, 1.0, 2.0, completion_tokens=9).completion_tokens == 9
    record = answered(0.0, 1.0, 2.0)
    assert (record.completion_tokens, record.counted_by_server) == (2, False)


def test_the_time_of_a_token_is_by_tokens_and_not_by_pieces():
    assert answered(0.0, 1.0, 2.0, completion_tokens=11).token_s == pytest.approx(0.1)


def test_a_run_is_counted_from_the_first_due_to_the_last_piece():
    records = [
        answered(0.0, 1.0, 2.0, completion_tokens=2),
        answered(1.0, 3.0, 4.0, completion_tokens=2, prompt_tokens=5),
    ]
    run = summarize(records)
    assert run.duration_s == pytest.approx(4.0)
    assert run.tokens_per_s == pytest.approx(1.0)
    assert run.requests_per_s == pytest.approx(0.5)
    assert (run.prompt_tokens, run.completion_tokens, run.counted_by) == (5, 4, "server")
    assert run.goodput is None


def test_goodput_is_what_met_every_bound_a_second():
    records = [
        answered(0.0, 0.4, 0.5, completion_tokens=2),
        answered(0.0, 0.6, 0.7, completion_tokens=2),  # its first token is late
        answered(0.0, 0.4, 2.0, completion_tokens=2),  # its second token is slow
        Record(0.0, ended_s=0.1, error="busy (503)"),
    ]
    run = summarize(records, Objective(ttft=0.5, itl=0.2))
    assert run.good_share == pytest.approx(0.25)
    assert run.goodput == pytest.approx(1 / 2.0)
    assert (run.num_failed, run.errors) == (1, {"busy (503)": 1})


def test_an_answer_without_text_is_no_answer():
    run = summarize([Record(0.0, ended_s=1.0)], Objective(e2e=10.0))
    assert (run.num_failed, run.errors, run.good_share) == (1, {"no text": 1}, 0.0)


def test_who_counted_is_said_for_each():
    run = summarize([answered(0.0, 1.0, completion_tokens=1), answered(0.0, 1.0)])
    assert run.counted_by == "server and pieces"


def test_rates_over_time_are_those_of_their_bins():
    assert over_time([0.0, 0.1, 0.9, 1.0], 0.0, 1.0, 2) == [4.0, 4.0]
    assert sum(rate * 0.25 for rate in over_time([5.0, 5.2, 5.9], 5.0, 1.0, 4)) == pytest.approx(3)


def test_an_objective_is_read_from_text():
    assert Objective.parse("ttft=0.5, itl=0.05s") == Objective(ttft=0.5, itl=0.05)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "ttft=-1", "ttft=nan", "ttft=inf", "speed=1"])
def test_what_is_no_objective_is_refused_by_its_name(text):
    with pytest.raises(UserError, match=f"{text!r} is no objective"):
        Objective.parse(text)


def test_runs_are_compared_in_pairs():
    ours = [summarize([answered(0.0, 1.0, 2.0)]), summarize([answered(0.0, 2.0, 4.0)])]
    theirs = [summarize([answered(0.0, 2.0, 4.0)]), summarize([answered(0.0, 2.0, 4.0)])]
    found = ratios(ours, theirs)
    assert found["ttft_s p50"] == pytest.approx([0.75, 0.5, 1.0])
    assert found["tokens_per_s"] == pytest.approx([1.5, 1.0, 2.0])
    assert medians(ours)["ttft_s p50"] == pytest.approx(1.5)
    assert all(math.isfinite(value) for value in medians(ours).values())
