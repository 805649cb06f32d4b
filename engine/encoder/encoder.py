"""What every encoder is: the tokens of several texts in, laid one after the other, and a state of each out.

Texts are neither padded nor masked: linear layers take all tokens as rows, and attention is run text by text, so
that a text's states do not depend on its company.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Attend = Callable[[mx.array, mx.array, mx.array], mx.array]


class Encoder(nn.Module):  # type: ignore[misc]
    """A model that is run whole. It keeps nothing, so that its list of caches is empty.

    `context_length` is how many tokens a text may have, None: as its configuration says.
    """

    context_length: int | None = None

    def __call__(
        self, ids: mx.array, cache: Sequence[Any] = (), *, lengths: Sequence[int] | None = None
    ) -> mx.array:
        """States `[1, T, size]` of the tokens `ids` `[1, T]` of texts of these `lengths`; None: one text."""
        return self.states(ids, [ids.shape[1]] if lengths is None else lengths)

    def states(self, ids: mx.array, lengths: Sequence[int]) -> mx.array:
        """As `__call__`."""
        raise NotImplementedError

    def make_cache(self) -> list[Any]:
        return []


def within(num_tokens: int, window: int | None) -> mx.array | None:
    """Which tokens see which: bool `[n, n]`, or None where all see all. A window lies half before a token and half
    behind it.
    """
    if window is None or num_tokens <= window // 2 + 1:
        return None
    places = mx.arange(num_tokens)
    return mx.abs(places[:, None] - places[None]) <= window // 2


def starts_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each text begins and ends."""
    places, start = [], 0
    for length in lengths:
        places.append((start, start + length))
        start += length
    return places


def attended(
    queries: mx.array, keys: mx.array, values: mx.array, num_heads: int, lengths: Sequence[int], attend: Attend
) -> mx.array:
    """`[1, T, size]`, each text by itself; `attend` is given `[1, heads, n, head_dim]` of one, thrice."""

    def heads(rows: mx.array, start: int, stop: int) -> mx.array:
        return rows[:, start:stop].reshape(1, stop - start, num_heads, -1).transpose(0, 2, 1, 3)

    outputs = []
    for start, stop in starts_of(lengths):
        output = attend(heads(queries, start, stop), heads(keys, start, stop), heads(values, start, stop))
        outputs.append(output.transpose(0, 2, 1, 3).reshape(1, stop - start, -1))
    return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
