"""What is said beside the percentiles."""

from mlxcel_cli.bench.record import Record
from mlxcel_cli.bench.summary import Objective, summarize
from mlxcel_cli.bench.table import rate, remarks, said, seconds


def test_a_slow_sender_says_so():
    late = Record(0.0, sent_s=0.5, pieces_s=[1.0, 1.5], ended_s=1.5)
    assert any("sent up to 0.500 s late" in line for line in remarks([summarize([late])]))
    late.sent_s = 0.001
    assert not any("late" in line for line in remarks([summarize([late])]))


def test_goodput_and_who_counted_are_said():
    lines = list(remarks([summarize([Record(0.0, pieces_s=[1.0, 2.0], ended_s=2.0)], Objective(ttft=1.5))]))
    assert "goodput 0.50 requests/s: 100% met the objective" in lines
    assert any(line.startswith("tokens are counted by pieces of text") for line in lines)


def test_numbers_have_the_digits_that_matter():
    assert [rate(value) for value in (1234.5, 12.34, 0.123)] == ["1234", "12.3", "0.12"]
    assert [seconds(value) for value in (12.345, 0.1234, 0.01234)] == ["12.35", "0.123", "0.0123"]
    assert [said(name) for name in ("ttft_s p50", "tokens_per_s")] == ["first token p50", "tokens/s"]
