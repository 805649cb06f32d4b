"""The engine's numbers: what is counted when, without a model."""

import pytest

from engine.errors import StepFailed
from engine.metrics import OUTCOMES, Histogram, Metrics, Times
from engine.plan import Piece, Tick
from engine.request import Failed, Output, Progress, Request, Row


def row(num_tokens=4):
    return Row(Request("r", (1,) * num_tokens), 10, 0, None)


def test_a_histogram_counts_each_value_once_at_the_first_bound_not_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.num_observed == 6
    assert histogram.total == 107.0


def test_what_is_read_does_not_change_any_more():
    metrics = Metrics()
    before = metrics.read()
    metrics.refused()
    metrics.ended("stop", Times(1.0), 3.0)
    assert before.requests == dict.fromkeys(OUTCOMES, 0)
    after = metrics.read()
    assert (after.requests["refused"], after.requests["stop"], after.e2e_s.total) == (1, 1, 2.0)


def test_one_request_from_its_arrival_to_its_last_token():
    metrics, one, times = Metrics(), row(), Times(10.0)
    metrics.started([times], 12.0)
    metrics.ran(Tick(prefill=(Piece(one, 0, 3),)), [(times, Progress(one, 3, 4))], 13.0)
    metrics.ran(
        Tick(prefill=(Piece(one, 3, 4),)), [(times, Progress(one, 4, 4)), (times, Output(one, 7, "a"))], 15.0
    )
    metrics.ran(Tick(decode=(one,)), [(times, Output(one, 7, "a"))], 15.5)
    numbers = metrics.read()
    assert (numbers.prompt_tokens, numbers.completion_tokens) == (4, 2)
    assert (numbers.prefill_pieces, numbers.prefill_grants, numbers.decode_steps) == (2, 2, 1)
    assert (numbers.forwards, numbers.rows_run) == (3, 3)
    assert (numbers.queue_wait_s.total, numbers.ttft_s.total, numbers.inter_token_s.total) == (2.0, 5.0, 0.5)
    assert numbers.prompt_s == 3.0


def test_a_mixed_step_is_one_forward_a_decode_step_and_a_grant():
    metrics, one, other, times = Metrics(), row(), row(), Times(0.0, 0.0)
    happened = [(times, Progress(one, 3, 4)), (times, Output(other, 7, "a"))]
    metrics.ran(Tick(prefill=(Piece(one, 0, 3),), decode=(other,)), happened, 1.0)
    numbers = metrics.read()
    assert (numbers.forwards, numbers.decode_steps, numbers.prefill_grants, numbers.rows_run) == (1, 1, 1, 2)
    assert (numbers.prompt_tokens, numbers.completion_tokens) == (3, 1)


def test_a_piece_that_failed_is_run_and_not_stored():
    metrics, one, times = Metrics(), row(), Times(0.0)
    metrics.started([times], 0.0)
    metrics.ran(Tick(prefill=(Piece(one, 0, 4),)), [(times, Failed(one, StepFailed("x")))], 1.0)
    numbers = metrics.read()
    assert (numbers.prefill_pieces, numbers.prompt_tokens, numbers.completion_tokens) == (1, 0, 0)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_has_its_count(outcome):
    metrics = Metrics()
    metrics.ended(outcome, Times(0.0), 1.0)
    assert metrics.read().requests == dict.fromkeys(OUTCOMES, 0) | {outcome: 1}


def test_what_a_preempted_row_computes_again_is_counted_apart():
    metrics, one, times = Metrics(), row(), Times(0.0)
    metrics.started([times], 1.0)
    metrics.ran(
        Tick(prefill=(Piece(one, 0, 4),)), [(times, Progress(one, 4, 4)), (times, Output(one, 7, "a"))], 2.0
    )
    one.output.append(7)
    one.start_over()
    metrics.ran(Tick(preempt=(one,)), [], 3.0)
    again = Tick(prefill=(Piece(one, 0, 5),))
    metrics.ran(again, [(times, Progress(one, 5, 5)), (times, Output(one, 8, "b"))], 9.0)
    numbers = metrics.read()
    assert (numbers.preemptions, numbers.prompt_tokens, numbers.recomputed_tokens) == (1, 4, 5)
    assert (numbers.ttft_s.num_observed, numbers.ttft_s.total, numbers.inter_token_s.total) == (1, 2.0, 7.0)
