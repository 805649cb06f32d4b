"""A dense row's whole state as one buffer of bytes, and back, bit for bit: keys and values, recurrent states, and
the logits behind them where the row has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from engine.cache.rows import DenseLayer, DenseStorage, StateLayer

LOGITS = -1  # in place of a layer's number


@dataclass(frozen=True, slots=True)
class _Part:
    """One array of one layer: bytes `start` to `stop` of the buffer."""

    layer: int
    entry: int
    shape: tuple[int, ...]
    dtype: mx.Dtype
    start: int
    stop: int


class RowCopy:
    """What `storage` holds now. Layers with a window give what later tokens can still see."""

    def __init__(self, storage: DenseStorage) -> None:
        self._length = storage.length
        parts, arrays, start = [], [], 0
        for layer, entry, array in _arrays(storage):
            stop = start + array.nbytes
            parts.append(_Part(layer, entry, array.shape, array.dtype, start, stop))
            arrays.append(array.reshape(-1).view(mx.uint8))
            start = stop
        self._parts = tuple(parts)
        # Not what is joined but what it is joined to makes this a buffer of its own.
        self._buffer = mx.concatenate([*arrays, mx.zeros((1,), mx.uint8)])
        mx.eval(self._buffer)

    @staticmethod
    def bytes_of(storage: DenseStorage) -> int:
        """How large the copy of `storage` would be."""
        return sum(array.nbytes for _, _, array in _arrays(storage)) + 1

    def put(self, storage: DenseStorage) -> None:
        """Begin an empty row with this state; evaluated when this returns."""
        assert storage.length == 0, "a row that has begun goes on by itself"
        layers = storage.leaves()
        entries: dict[int, dict[int, mx.array]] = {}
        for part in self._parts:
            array = self._buffer[part.start : part.stop].view(part.dtype).reshape(part.shape)
            entries.setdefault(part.layer, {})[part.entry] = array
        if logits := entries.pop(LOGITS, None):
            storage.logits = logits[0]
            mx.eval(storage.logits)
        for number, arrays in entries.items():
            layer = layers[number]
            if isinstance(layer, StateLayer):
                for entry, array in arrays.items():
                    layer.entries[entry] = array
            else:
                layer.begin(self._length - arrays[0].shape[2])
                layer.append(arrays[0], arrays[1])
        storage.length = self._length
        mx.eval(storage.arrays())


def _arrays(storage: DenseStorage) -> Iterator[tuple[int, int, mx.array]]:
    """Every array of the row by its layer's number and its own in that layer."""
    for number, layer in enumerate(storage.leaves()):
        for entry, array in enumerate(_entries(layer)):
            if array is not None:
                yield number, entry, array
    if storage.logits is not None:
        yield LOGITS, 0, storage.logits


def _entries(layer: DenseLayer | StateLayer) -> list[mx.array | None]:
    if isinstance(layer, StateLayer):
        return layer.entries
    if not layer.arrays():
        return []
    first = max(layer.first_held, layer.length - layer.num_kept) if layer.window else 0
    return list(layer.between(first, layer.length))
