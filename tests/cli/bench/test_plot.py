"""Axes have round marks that hold what is drawn, and a picture is XML that says what it shows."""

import xml.etree.ElementTree as ElementTree

import pytest

from mlxcel_cli.bench.plot import Bar, Line, bars, lines, ticks


@pytest.mark.parametrize(
    ("least", "largest", "marks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 230, [0, 50, 100, 150, 200, 250]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
    ids=str,
)
def test_marks_are_round_and_hold_the_ends(least, largest, marks):
    assert ticks(least, largest) == pytest.approx(marks)


def test_a_picture_of_lines_is_whole_and_described():
    drawn = [Line("a < b", [(1, 2), (3, 4)], [(1, 3), (3, 5)], dots=True), Line("empty", [])]
    figure = ElementTree.fromstring(lines("Title & more", "x", "y", drawn))
    assert [title.text for title in figure.iter("title")] == ["Title & more"]
    assert [said.text for said in figure.iter("desc")] == ["a < b: from 2 at 1 to 4 at 3; empty: nothing"]
    assert len(list(figure.iter("circle"))) == 2
    assert [item.text or item[0].tail for item in figure.iter("li")] == ["a < b", "empty"]


def test_a_picture_of_bars_has_one_for_each_part():
    figure = ElementTree.fromstring(
        bars("Rows", "s", [Bar([(0, 1, 0), (1, 2, 1)]), Bar([(0, 2, 4)])], ["a", "", "c"])
    )
    drawn = [part for part in figure.iter("rect") if part.get("y")]
    assert [part.get("class") for part in drawn] == ["bar c0", "bar c1", "bar c4"]
    assert len(list(figure.iter("li"))) == 2
