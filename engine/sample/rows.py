"""What the stages of the sampler step share: they run on the rows that use them, and on no others."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.sample.state import Draw

Stage = Callable[[mx.array, Sequence[Draw]], mx.array]


def for_rows(values: mx.array, draws: Sequence[Draw], uses: Callable[[Draw], object], stage: Stage) -> mx.array:
    """`values` `[B, ...]` with `stage` applied, in float32, to the rows that use it; where none does: `values`."""
    rows = [i for i, draw in enumerate(draws) if uses(draw)]
    if not rows:
        return values
    if len(rows) == len(draws):
        return stage(values.astype(mx.float32), draws)
    own = stage(values[mx.array(rows)].astype(mx.float32), [draws[i] for i in rows])
    replaced = values.astype(mx.float32)
    replaced[mx.array(rows)] = own
    return replaced


def column(values: Sequence[float]) -> mx.array:
    """One number for each row: `[B, 1]`."""
    return mx.array(list(values))[:, None]


def table(lists: Sequence[list[float]]) -> mx.array:
    """Lists of different lengths side by side; the shorter ones repeat their last entry, which changes nothing."""
    longest = max(map(len, lists))
    return mx.array([entries + entries[-1:] * (longest - len(entries)) for entries in lists])
