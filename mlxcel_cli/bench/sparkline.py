"""Many numbers as one short word of bars."""

import itertools
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """`values` from left to right, or the means of neighbours in `width` places; the largest is a full bar."""
    if not values:
        return ""
    shown = _fewer(values, width)
    top = max(shown)
    return "".join(
        BARS[min(int(len(BARS) * value / top), len(BARS) - 1)] if top > 0 else BARS[0] for value in shown
    )


def distribution(values: Sequence[float], width: int = 24, largest: float | None = None) -> str:
    """How many of `values` lie in each of `width` equal parts from 0 to `largest` of them; what is beyond counts
    in the last.
    """
    if not values:
        return ""
    top = max(values) if largest is None else largest
    counts = [0] * width
    for value in values:
        counts[min(int(width * value / top), width - 1) if top > 0 else 0] += 1
    return sparkline([float(count) for count in counts], width)


def _fewer(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(part * len(values) / width) for part in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
