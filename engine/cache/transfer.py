"""A row's state out of one engine and into another: what its layers keep, as bytes where they lie, and back.

Keys and values leave in the order of their positions, whatever storage holds them, so a row may arrive in another
kind of storage than it left. Nothing is copied to leave, but for blocks that are scattered over a pool. Who the
bytes are for and how they travel is not known here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache import dtype
from engine.cache.adapter import SequenceStorage, leaf_caches
from engine.cache.kinds import LayerKind, leaf_kinds
from engine.cache.pages import PagedLayer, PagedStorage, in_place
from engine.cache.rows import DenseLayer, DenseStorage, RowStorage, StateLayer
from engine.forward import Forward, Span
from engine.handover import Arriving, Departing, Identity, RowState, StoredArray

MAX_RUNS = 64  # of blocks that follow each other in one row; more are laid together first
Numbers = np.ndarray[Any, Any]
Found = tuple[StoredArray, list[Numbers]]


class Transfer:
    """Takes apart and puts together the rows of one `forward`, whose model has what `digest` gives as its own."""

    def __init__(self, forward: Forward, digest: Callable[[], str]) -> None:
        self._forward = forward
        self._digest = digest
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        """Whose states fit here; a row of one token tells how large they are."""
        if self._identity is None:
            row = self._forward.open_dense()
            mx.eval(self._forward.run([Span(row, [0], num_sampled=1)]), row.arrays())
            _, arrays, scalars = _taken(row)
            stored_as = self._forward.cache_dtype
            self._identity = Identity(
                self._digest(),
                _kept(row, self._forward.kinds),
                "the model's own type" if stored_as is None else dtype.name_of(stored_as),
                tuple(array for array, _ in arrays),
                scalars,
            )
        return self._identity

    def departing(self, storage: RowStorage) -> Departing:
        """What an evaluated row keeps. `storage` is not to be written to while the buffers are read."""
        length, arrays, scalars = _taken(storage)
        buffers = [part.data.cast("B") for _, parts in arrays for part in parts if part.size]
        return Departing(RowState(self.identity, length, tuple(array for array, _ in arrays), scalars), buffers)

    def land(self, arriving: Arriving, storage: RowStorage) -> None:
        """Begin the empty `storage` with a state that fits; evaluated when this returns."""
        state = arriving.state
        arrays = _arrays(arriving)
        if isinstance(storage, SequenceStorage):
            for cache, scalars in zip(leaf_caches(storage.caches), state.scalars, strict=True):
                cache.state = _joined(scalars, [array for _, array in arrays])
        elif isinstance(storage, PagedStorage):
            _land_paged(arrays, state.length, storage)
        else:
            assert isinstance(storage, DenseStorage), "no other storage is known"
            _land_dense(arrays, storage)
        storage.length = state.length
        mx.eval(storage.arrays())


def _kept(row: RowStorage, kinds: Sequence[LayerKind]) -> tuple[str, ...]:
    """What each layer keeps, in words, lists taken apart."""
    if isinstance(row, SequenceStorage):
        return tuple(type(cache).__name__ for cache in leaf_caches(row.caches))
    return tuple(kind.words for kind in leaf_kinds(kinds))


def _taken(storage: RowStorage) -> tuple[int, list[Found], tuple[Any, ...]]:
    """Length, arrays and scalars of a row."""
    if isinstance(storage, SequenceStorage):
        found: list[mx.array] = []
        layers: list[int] = []
        scalars = []
        for layer, cache in enumerate(leaf_caches(storage.caches)):
            scalars.append(_split(cache.state, found))
            layers += [layer] * (len(found) - len(layers))
        mx.eval(found)
        return storage.length, list(map(_whole, layers, range(len(found)), found)), tuple(scalars)
    if isinstance(storage, PagedStorage):
        return (
            storage.length,
            [f for n, leaf in enumerate(storage.attention_layers()) for f in _of_pool(n, leaf)],
            (),
        )
    assert isinstance(storage, DenseStorage), "no other storage is known"
    return storage.length, [found for n, leaf in enumerate(storage.leaves()) for found in _of_layer(n, leaf)], ()


def _of_layer(number: int, layer: DenseLayer | StateLayer) -> Iterator[Found]:
    if isinstance(layer, StateLayer):
        for entry, array in enumerate(layer.entries):
            if array is not None:
                yield _whole(number, entry, array)
    elif layer.arrays():
        keys, values, base = layer.stored()
        first = max(base, layer.length - layer.num_kept) if layer.window else base
        for entry, array in enumerate((keys, values)):
            yield _sequence(number, entry, array, first, [(first - base, layer.length - base)])


def _of_pool(number: int, layer: PagedLayer) -> Iterator[Found]:
    """What a paged row has in one layer's pool: the positions from its table's first block on."""
    if layer.pool.keys is None:
        return
    base = layer.table.base
    runs = layer.runs(base)
    arrays = layer.pool.arrays()
    if len(runs) > MAX_RUNS:
        arrays = layer.view(base)
        mx.eval(arrays)
        runs = [(0, layer.length - base)]
    for entry, array in enumerate(arrays):
        yield _sequence(number, entry, array, base, runs)


def _sequence(number: int, entry: int, array: mx.array, first: int, runs: Sequence[tuple[int, int]]) -> Found:
    """The tokens of `runs` of keys or values, head by head."""
    heads, dim = array.shape[1], array.shape[3]
    within = in_place(array)
    parts = [within[0, head, start:stop] for head in range(heads) for start, stop in runs]
    num_tokens = sum(stop - start for start, stop in runs)
    return StoredArray(number, entry, (1, heads, num_tokens, dim), _name(array), first), parts


def _whole(number: int, entry: int, array: mx.array) -> Found:
    return StoredArray(number, entry, array.shape, _name(array)), [np.ascontiguousarray(in_place(array))]


def _name(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]


def _arrays(arriving: Arriving) -> list[tuple[StoredArray, mx.array]]:
    """The arrays that came, in MLX's own memory."""
    arrays, start, data = [], 0, np.frombuffer(arriving.data, np.uint8)
    for stored in arriving.state.arrays:
        stop = start + stored.num_bytes
        flat = mx.array(data[start:stop])
        arrays.append((stored, flat.view(getattr(mx, stored.dtype)).reshape(stored.shape)))
        start = stop
    return arrays


def _land_dense(arrays: Sequence[tuple[StoredArray, mx.array]], storage: DenseStorage) -> None:
    leaves = storage.leaves()
    of_layer: dict[int, list[tuple[StoredArray, mx.array]]] = {}
    for stored, array in arrays:
        of_layer.setdefault(stored.layer, []).append((stored, array))
    for number, found in of_layer.items():
        leaf = leaves[number]
        if isinstance(leaf, StateLayer):
            for stored, array in found:
                leaf.entries[stored.entry] = array
        else:
            leaf.begin(found[0][0].first or 0)
            leaf.append(found[0][1], found[1][1])


def _land_paged(arrays: Sequence[tuple[StoredArray, mx.array]], length: int, storage: PagedStorage) -> None:
    leaves = storage.attention_layers()
    first = [0] * len(storage.tables)
    for stored, _ in arrays:
        group = leaves[stored.layer].group
        first[group] = max(first[group], stored.first or 0)
    storage.begin_at(first, length)
    for (stored, keys), (_, values) in zip(arrays[::2], arrays[1::2], strict=True):
        layer = leaves[stored.layer]
        begins = first[layer.group]
        skipped = begins - (stored.first or 0)
        layer.put(begins, keys[:, :, skipped:], values[:, :, skipped:])


def _split(state: Any, arrays: list[mx.array]) -> Any:
    """`state` with each array put behind `arrays` and its place there, as text, in its stead."""
    if isinstance(state, mx.array):
        arrays.append(state)
        return f"array {len(arrays) - 1}"
    if isinstance(state, (list, tuple)):
        return [_split(part, arrays) for part in state]
    assert state is None or isinstance(state, (bool, int, float)), "mlx-lm's caches hold arrays and numbers"
    return state


def _joined(state: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(state, str):
        return arrays[int(state.removeprefix("array "))]
    return [_joined(part, arrays) for part in state] if isinstance(state, (list, tuple)) else state
