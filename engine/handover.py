"""What goes with a row from one engine to another: plain data, no arrays and no wire.

A row is its request, how far it came (`Resumed`), and what its layers keep (`RowState` and the bytes behind it).
The state is a saving and not a need: without it the row is computed again from its tokens, and since a draw
depends on seed, index and logits alone, it goes on with the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
MAX_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of one layer, its `entry`th. With `first`, it is keys or values `[1, heads, tokens, dim]` of the
    positions from `first` on; else what a layer keeps beside such.
    """

    layer: int
    entry: int
    shape: tuple[int, ...]
    dtype: str
    first: int | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_sound(self) -> bool:
        """Whether its size can be told."""
        sizes = (*self.shape, self.first or 0)
        return self.dtype in DTYPE_BYTES and len(self.shape) <= 8 and all(0 <= size < MAX_SIZE for size in sizes)

    def unlike(self, ours: "StoredArray", length: int, *, exact: bool) -> bool:
        """Whether it is not what `ours`, of a row of one token, is in a row of `length`."""
        place, our_place = (self.layer, self.entry, self.dtype), (ours.layer, ours.entry, ours.dtype)
        if place != our_place or (self.first is None) != (ours.first is None):
            return True
        shape = ours.shape
        if self.first is not None:
            shape = (*shape[:2], length - self.first, *shape[3:])
        if exact:
            return self.shape != shape
        # The caches of mlx-lm have room for more than they hold.
        theirs, room = self.shape, shape[2:3]
        if len(theirs) != len(shape) or (*theirs[:2], *theirs[3:]) != (*shape[:2], *shape[3:]):
            return True
        return any(size < min(length, most) for size, most in zip(theirs[2:3], room, strict=True))


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose states fit whose: the model by its files, what its layers keep, and the type of keys and values.

    `layout` are the arrays of a row of one token. Where rows are kept in mlx-lm's own caches, `scalars` is what
    those hold around them, and the arrays are longer than what is stored.
    """

    digest: str
    layers: tuple[str, ...]
    cache_dtype: str
    layout: tuple[StoredArray, ...] = ()
    scalars: tuple[Any, ...] = ()

    def unlike(self, other: "Identity") -> str | None:
        """Why states of `other` do not fit here, by name, or None."""
        if self.digest != other.digest:
            return f"the model is another one: its digest is {other.digest}, and here {self.digest}"
        for number, (ours, theirs) in enumerate(zip_longest(self.layers, other.layers, fillvalue="nothing")):
            if ours != theirs:
                return f"layer {number} keeps {theirs}, and here {ours}"
        if self.cache_dtype != other.cache_dtype:
            return f"keys and values are stored as {other.cache_dtype}, and here as {self.cache_dtype}"
        return None


@dataclass(frozen=True, slots=True)
class RowState:
    """What the layers of a row of `length` tokens keep: `arrays`, whose bytes follow each other in C order.

    `scalars` is what mlx-lm's own caches hold around arrays, with their places, where rows are kept in those.
    """

    identity: Identity
    length: int
    arrays: tuple[StoredArray, ...]
    scalars: tuple[Any, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    def unfit(self, here: Identity, *, num_tokens: int, most_bytes: int) -> str | None:
        """Why a row of `num_tokens` cannot go on from this in an engine that is `here`, or None."""
        if unlike := here.unlike(self.identity):
            return unlike
        if self.length != num_tokens:
            return f"{self.length} tokens are stored, and the row has {num_tokens}"
        if not all(array.is_sound for array in self.arrays):
            return "the size or the type of an array is none"
        if self.num_bytes > most_bytes:
            return f"{self.num_bytes} bytes are more than the {most_bytes} that a row takes here at most"
        for ours, theirs in zip_longest(here.layout, self.arrays):
            if not (ours and theirs) or theirs.unlike(ours, self.length, exact=not here.scalars):
                return f"a row has {_told(theirs)} where one of {self.length} tokens has {_told(ours)} here"
        if not _alike(self.scalars, here.scalars, self.length):
            return "the caches hold something else around their arrays"
        return self._gaps(here)

    def _gaps(self, here: Identity) -> str | None:
        """Where what later tokens see is not there, or None."""
        begins: dict[int, int] = {}
        for array in self.arrays:
            if array.first is None:
                continue
            window = _window(here.layers[array.layer])
            needed = max(0, self.length + 1 - window) if window else 0
            if array.first > needed or begins.setdefault(array.layer, array.first) != array.first:
                return f"layer {array.layer} begins at {array.first}, and is seen from {needed} on"
        return None


@dataclass(frozen=True, slots=True)
class Departing:
    """A row's state on its way out: `buffers` are its bytes where they lie, in order, each in one piece.

    They are read in place: the row's storage stays what it is until they were.
    """

    state: RowState
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A row's state that has come, and all of its bytes. What it says was held against `RowState.unfit`."""

    state: RowState
    data: bytearray


def _window(layer: str) -> int:
    """How far a layer sees, by its words; 0: all."""
    name, _, size = layer.partition(" ")
    return int(size) if name == "window" else 0


def _told(array: StoredArray | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)} in layer {array.layer}"


def _alike(one: Any, ours: Any, length: int) -> bool:
    """Whether both are nested the same way, with the same arrays in the same places, and numbers that a row of
    `length` tokens may have where ours has one.
    """
    if isinstance(one, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(one) == len(ours) and all(_alike(a, b, length) for a, b in zip(one, ours, strict=True))
    if type(one) is int and type(ours) is int:
        return one == ours or 0 <= one <= length
    return type(one) is type(ours) and one == ours
