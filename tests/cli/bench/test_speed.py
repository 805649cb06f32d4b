"""Steps are read off pieces of text, and off tokens where pieces say too little."""

import pytest

from mlxcel_cli.bench.record import Record
from mlxcel_cli.bench.speed import steps_of


def record(*pieces_s: float, tokens: int | None = None) -> Record:
    usage = {"completion_tokens": len(pieces_s) if tokens is None else tokens}
    return Record(0.0, pieces_s=list(pieces_s), ended_s=pieces_s[-1], usage=usage)


def test_one_request_has_its_own_gaps():
    assert steps_of([record(1.0, 1.5, 2.5)]) == pytest.approx([0.5, 1.0])


def test_only_the_time_in_which_all_decode_counts():
    early = record(1.0, 1.5, 5.0, 5.2, 5.4)  # held up while the other's prompt was stored
    late = record(5.0, 5.2, 5.4, 5.5, 5.6)  # alone at its end
    assert steps_of([early, late]) == pytest.approx([0.2, 0.2, 0.2, 0.2])


def test_where_text_is_rare_a_step_is_the_mean_over_tokens():
    assert steps_of([record(1.0, 3.0, tokens=11)]) == pytest.approx([0.2])
