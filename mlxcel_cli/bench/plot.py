"""Pictures of numbers as inline SVG: lines with ranges, and bars of time. Colours are the page's variables.

Every picture has a title and a description for who cannot see it; the figures are in the page's tables as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 16, 44
NUM_COLOURS = 6
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One named line through points (x, y); `ranges` are the least and largest y at each, where they are known."""

    name: str
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float]] = ()
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a picture of time: parts (begin, end, colour's number)."""

    parts: Sequence[tuple[float, float, int]]


def lines(title: str, x_name: str, y_name: str, drawn: Sequence[Line]) -> str:
    """A figure with the lines, both axes from 0, and a legend where there are several."""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points] + [
        y for line in drawn for ends in line.ranges for y in ends
    ]
    x_ticks, y_ticks = ticks(0, max(xs, default=1)), ticks(0, max(ys, default=1))
    across, up = _scale(x_ticks, LEFT, WIDTH - RIGHT), _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x_ticks, y_ticks, across, up, x_name, y_name)]
    for number, line in enumerate(drawn):
        colour = f"c{number % NUM_COLOURS}"
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for (x, _), (least, largest) in zip(line.points, line.ranges, strict=False):
            parts.append(_line(f"range {colour}", across(x), up(least), across(x), up(largest)))
        if line.dots:
            parts += [
                f'<circle class="dot {colour}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5"/>'
                for x, y in line.points
            ]
    said = "; ".join(_described(line) for line in drawn)
    legend = _legend([line.name for line in drawn]) if len(drawn) > 1 else ""
    return _figure(title, said, HEIGHT, "".join(parts), legend)


def bars(title: str, x_name: str, rows: Sequence[Bar], names: Sequence[str]) -> str:
    """A figure with one thin bar for each row, over time; `names` are what the colours mean,
    an empty one: nothing has it."""
    row_px = max(2.0, min(10.0, 360 / max(len(rows), 1)))
    height = int(TOP + row_px * len(rows) + BOTTOM)
    x_ticks = ticks(0, max((end for row in rows for _, end, _ in row.parts), default=1))
    across = _scale(x_ticks, LEFT, WIDTH - RIGHT)
    parts = [_x_axis(x_ticks, across, height, x_name)]
    for place, row in enumerate(rows):
        y = TOP + place * row_px
        for begin, end, number in row.parts:
            wide = max(across(end) - across(begin), 0.5)
            parts.append(
                f'<rect class="bar c{number % NUM_COLOURS}" x="{across(begin):.1f}" y="{y:.1f}" '
                f'width="{wide:.1f}" height="{max(row_px - 1, 1):.1f}"/>'
            )
    return _figure(title, f"{len(rows)} rows", height, "".join(parts), _legend(names))


def ticks(least: float, largest: float) -> list[float]:
    """Round numbers from at most `least` to at least `largest`, evenly spaced."""
    if largest <= least:
        largest = least + (abs(least) or 1.0)
    rough = (largest - least) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(least / step + 1e-9)
    last = math.ceil(largest / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


class _Scale:
    """From a value to a place in the picture."""

    def __init__(self, least: float, largest: float, start: float, end: float) -> None:
        self._least, self._start = least, start
        self._factor = (end - start) / (largest - least)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._least) * self._factor


def _scale(marks: Sequence[float], start: float, end: float) -> _Scale:
    return _Scale(marks[0], marks[-1], start, end)


def _axes(
    x_ticks: Sequence[float], y_ticks: Sequence[float], across: _Scale, up: _Scale, x_name: str, y_name: str
) -> str:
    parts = []
    for mark in y_ticks:
        y = up(mark)
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text("tick", f'x="{LEFT - 6}" y="{y:.1f}" dy="4"', _number(mark), anchor="end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text("name", f'transform="translate(14 {middle:.0f}) rotate(-90)"', y_name))
    return "".join(parts) + _x_axis(x_ticks, across, HEIGHT, x_name)


def _x_axis(marks: Sequence[float], across: _Scale, height: int, name: str) -> str:
    base = height - BOTTOM
    parts = [_line("axis", LEFT, base, WIDTH - RIGHT, base)]
    for mark in marks:
        x = across(mark)
        parts.append(_line("axis", x, base, x, base + 4))
        parts.append(_text("tick", f'x="{x:.1f}" y="{base + 17}"', _number(mark)))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text("name", f'x="{middle:.0f}" y="{height - 8}"', name))
    return "".join(parts)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, place: str, said: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" {place} text-anchor="{anchor}">{escape(said)}</text>'


def _figure(title: str, said: str, height: int, inside: str, legend: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(said)}</desc>{inside}</svg>{legend}</figure>\n"
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect class="bar c{number % NUM_COLOURS}" '
        f'width="12" height="12" rx="2"/></svg>{escape(name)}</li>'
        for number, name in enumerate(names)
        if name
    )
    return f'<ul class="legend">{items}</ul>'


def _described(line: Line) -> str:
    if not line.points:
        return f"{line.name}: nothing"
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    return f"{line.name}: from {_number(y0)} at {_number(x0)} to {_number(y1)} at {_number(x1)}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
