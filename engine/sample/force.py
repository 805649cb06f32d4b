"""Tokens that come whatever was drawn: the end of a thought whose budget is used up.

Which they are is decided by the finish step from the row's own tokens, so it is the same in any company and after
a resumption. Nothing is drawn differently because of them. A row's grammar stands above them: where it goes on
otherwise, as in channels of which a call is to be the next, what is drawn stays.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.request import Row
from engine.sample.state import Draw


def force(drawn: mx.array, rows: Sequence[Row], draws: Sequence[Draw]) -> mx.array:
    """`drawn` int32 `[B]`, with the first forced token of each row that has one, and may have it, in its place."""
    forced = [
        row.forced[0] if row.forced and _allows(draw, row.forced[0]) else -1
        for row, draw in zip(rows, draws, strict=True)
    ]
    if max(forced, default=-1) < 0:
        return drawn
    tokens = mx.array(forced, mx.int32)
    return mx.where(tokens >= 0, tokens, drawn)


def _allows(draw: Draw, token: int) -> bool:
    return draw.allowed is None or bool(draw.allowed[token // 8] >> token % 8 & 1)
