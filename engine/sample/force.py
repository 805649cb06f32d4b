"""Tokens that come whatever was drawn: the end of a thought whose budget is used up.

Which they are is decided by the finish step from the row's own tokens, so it is the same in any company and after
a resumption. Nothing is drawn differently because of them.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.request import Row


def force(drawn: mx.array, rows: Sequence[Row]) -> mx.array:
    """`drawn` int32 `[B]`, with the first forced token of each row that has one in its place."""
    if not any(row.forced for row in rows):
        return drawn
    tokens = mx.array([row.forced[0] if row.forced else -1 for row in rows], mx.int32)
    return mx.where(tokens >= 0, tokens, drawn)
