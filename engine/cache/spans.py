"""What the prefix tree holds of a dense row: for each block, the keys and values of all its layers, copied.

A span is one buffer of bytes, in the order of the layers, all keys before all values; so a block is one allocation
and its bits are those that were stored. A layer with a window puts in every position too: which of them a later
row needs depends on where it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.prefix import BLOCK_TOKENS
from engine.cache.rows import DenseLayer, DenseStorage


@dataclass(frozen=True, slots=True)
class _Part:
    """The keys or the values of one layer in a span: bytes `start` to `stop`."""

    layer: int
    heads: int
    dim: int
    dtype: mx.Dtype
    start: int
    stop: int


class SpanLayout:
    """Where each layer's keys and values lie in a span; the same for all rows of a model.

    `of` is a row that has stored tokens. Layers that store nothing have no place.
    """

    def __init__(self, of: DenseStorage) -> None:
        layers = of.attention_layers()
        self._keys, middle = _parts([layer.arrays()[:1] for layer in layers], 0)
        self._values, self.num_bytes = _parts([layer.arrays()[1:] for layer in layers], middle)

    def take(self, storage: DenseStorage, start: int, stop: int) -> list[mx.array]:
        """Copies of the blocks of tokens `start` to `stop`, evaluated: uint8 `[num_bytes]` each."""
        assert start % BLOCK_TOKENS == stop % BLOCK_TOKENS == 0, "spans are whole blocks"
        layers = storage.attention_layers()
        views = {part.layer: layers[part.layer].between(start, stop) for part in self._keys}
        keys = mx.concatenate([_in_blocks(views[part.layer][0]) for part in self._keys], axis=1)
        values = mx.concatenate([_in_blocks(views[part.layer][1]) for part in self._values], axis=1)
        spans = [mx.concatenate([keys[i], values[i]]) for i in range(keys.shape[0])]
        mx.eval(spans)
        return spans

    def put(self, spans: Sequence[mx.array], storage: DenseStorage) -> None:
        """Begin an empty row with these blocks, which are its first; evaluated when this returns."""
        assert storage.length == 0, "a row that has begun goes on by itself"
        blocks = mx.stack(list(spans))
        num_tokens = len(spans) * BLOCK_TOKENS
        layers = storage.attention_layers()
        for keys, values in zip(self._keys, self._values, strict=True):
            layer = layers[keys.layer]
            first = _first_seen(layer, num_tokens) // BLOCK_TOKENS
            layer.begin(first * BLOCK_TOKENS)
            layer.append(_in_sequence(blocks[first:], keys), _in_sequence(blocks[first:], values))
        storage.length = num_tokens
        mx.eval(storage.arrays())


def _parts(arrays: Sequence[Sequence[mx.array]], start: int) -> tuple[list[_Part], int]:
    """The part of each layer's array, if it has one, from byte `start` on; and where they end."""
    parts = []
    for layer, found in enumerate(arrays):
        for array in found:
            heads, dim = array.shape[1], array.shape[3]
            stop = start + heads * BLOCK_TOKENS * dim * array.dtype.size
            parts.append(_Part(layer, heads, dim, array.dtype, start, stop))
            start = stop
    return parts, start


def _first_seen(layer: DenseLayer, position: int) -> int:
    """The first position that this layer still needs of a row that goes on at `position`."""
    return max(0, position - layer.num_kept) if layer.window else 0


def _in_blocks(sequence: mx.array) -> mx.array:
    """One sequence `[1, heads, n * 16, dim]` to bytes `[n, heads * 16 * dim * size]`."""
    _, heads, num_tokens, dim = sequence.shape
    blocks = sequence.reshape(heads, num_tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim).transpose(1, 0, 2, 3)
    return blocks.reshape(blocks.shape[0], -1).view(mx.uint8)


def _in_sequence(blocks: mx.array, part: _Part) -> mx.array:
    """The part of spans `[n, bytes]` that is one layer's, as `[1, heads, n * 16, dim]`."""
    numbers: Any = blocks[:, part.start : part.stop].view(part.dtype)
    numbers = numbers.reshape(-1, part.heads, BLOCK_TOKENS, part.dim).transpose(1, 0, 2, 3)
    sequence: mx.array = numbers.reshape(1, part.heads, -1, part.dim)
    return sequence
