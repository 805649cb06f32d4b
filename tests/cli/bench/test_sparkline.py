"""Numbers as bars."""

from mlxcel_cli.bench.sparkline import BARS, distribution, sparkline


def test_the_largest_is_a_full_bar_and_nothing_the_lowest():
    assert sparkline([0.0, 4.0, 8.0]) == f"{BARS[0]}{BARS[4]}{BARS[-1]}"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == BARS[0] * 2


def test_many_values_become_means_of_neighbours():
    assert sparkline([1.0, 1.0, 3.0, 5.0], width=2) == sparkline([1.0, 4.0])


def test_a_distribution_counts_from_zero():
    assert distribution([0.1, 0.1, 1.0], width=2) == f"{BARS[-1]}{BARS[4]}"
    assert distribution([], width=2) == ""
    assert distribution([0.0], width=2) == f"{BARS[-1]}{BARS[0]}"
