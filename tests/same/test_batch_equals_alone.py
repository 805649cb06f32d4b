"""Rows that run together equal each row alone, bit for bit."""

import numpy as np
import pytest

from engine.plan import Piece, PrefillPlan, Tick

GREEDY = {}
DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


def assert_same(watched, requests, **options):
    """Tokens and logits of every row are the same in the batch and alone."""
    assert_as_alone(watched, requests.values(), lambda: watched.together(requests, **options))


def assert_as_alone(watched, requests, run):
    alone = {}
    for request in requests:
        watched.logits.clear()
        alone[request.id] = watched.alone(request), dict(watched.logits)
    watched.logits.clear()
    for row in run():
        tokens, logits = alone[row.request.id]
        assert row.output == tokens
        for key, expected in logits.items():
            assert np.array_equal(watched.logits[key], expected)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("piece", [1000, 7])
def test_rows_of_any_length_joining_at_any_step(watched, sampling, piece):
    lengths = {1: 3, 5: 9, 50: 40}
    requests = {
        step: watched.request(f"joins at {step}", length, 60, seed=step, **sampling)
        for step, length in lengths.items()
    }
    assert_same(watched, requests, piece=piece)


def test_eight_rows_at_once(watched):
    requests = {step: watched.request(f"row {step}", 1 + 5 * step, 12, seed=step) for step in range(1, 9)}
    assert_same(watched, requests)


@pytest.mark.real
def test_real_model(real):
    lengths = {1: 3, 2: 9, 5: 20}
    requests = {step: real.request(f"row {step}", length, 8, seed=step) for step, length in lengths.items()}
    assert_same(real, requests)


def test_a_mixed_step_equals_its_parts(watched):
    """Decode rows and a prefill piece in one forward are what they are apart."""
    first, second = (watched.request(name, length, 4, seed=length) for name, length in (("a", 5), ("b", 23)))
    expected = watched.alone(first), watched.alone(second)
    a, b = watched.engine.submit(first), watched.engine.submit(second)
    watched.store(a, 100)
    watched.engine.run(Tick(prefill=(Piece(b, 0, 11),), decode=(a,)))
    watched.engine.run(Tick(prefill=(Piece(b, 11, 23),), decode=(a,)))
    assert (watched.finish(a), watched.finish(b)) == expected


@pytest.mark.parametrize("mixed", [0, 20, 40])
def test_a_schedule_changes_nothing(watched, mixed):
    requests = [watched.request(f"row {i}", length, 9, seed=i) for i, length in enumerate((5, 60, 3, 17, 100, 1))]
    ticks = []

    def run():
        rows, seen = watched.scheduled(requests, PrefillPlan(fixed_tokens=32, mixed_tokens=mixed))
        ticks.extend(seen)
        return rows

    assert_as_alone(watched, requests, run)
    assert any(tick.prefill and tick.decode for tick in ticks) == bool(mixed)


def test_prompts_in_one_forward_equal_those_alone(watched):
    requests = [watched.request(f"row {i}", length, 5, seed=i) for i, length in enumerate((23, 1, 40, 16))]

    def run():
        rows = [watched.engine.submit(request) for request in requests]
        pieces = PrefillPlan(fixed_tokens=80).pieces(rows, decoding=False)
        assert len(pieces) == len(rows)
        watched.engine.prefill(pieces)
        for row in rows:
            watched.finish(row)
        return rows

    assert_as_alone(watched, requests, run)
