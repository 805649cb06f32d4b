"""Dense storage: what one row keeps, one contiguous span of keys and values per layer.

A row owns its storage for its whole life; nothing is merged, padded or extracted.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from engine.cache.dtype import rounded
from engine.cache.kinds import LayerKind
from engine.cache.prefix import BLOCK_TOKENS

GROWTH_TOKENS = 256


class RowStorage(Protocol):
    """What the engine asks of a row's state, whoever keeps it. `length` counts the tokens stored."""

    length: int

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate after a forward."""
        ...

    def free(self) -> None:
        """Let go of everything; the row is not to be used again."""
        ...


class DenseLayer:
    """Keys and values of one layer of one row, in the order of their positions.

    A layer with a window forgets what no later query can see, and moves the rest to the front when its buffer
    is full, so that a token's cost does not depend on the position. It keeps the last block that is not whole, so
    that each can be copied when it is, and `spare_tokens` more, to be rewound by as many. Shapes:
    `[1, heads, tokens, head_dim]`. They are stored as `dtype`, or, with None, as what they are.
    """

    __slots__ = ("_base", "_dtype", "_keys", "_length", "_spare_tokens", "_values", "_window")

    def __init__(self, kind: LayerKind, dtype: mx.Dtype | None = None, spare_tokens: int = 0) -> None:
        self._window = kind.window
        self._spare_tokens = spare_tokens
        self._dtype = dtype
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._base = 0  # position of the first token in the buffers
        self._length = 0  # position of the next token

    @property
    def length(self) -> int:
        """How many tokens were stored so far, those forgotten included."""
        return self._length

    @property
    def window(self) -> int:
        """How many positions, itself included, a query sees; 0: all."""
        return self._window

    @property
    def num_kept(self) -> int:
        """How many of its last tokens a layer with a window keeps for the next ones; 0: all."""
        return max(self._window, BLOCK_TOKENS) - 1 + self._spare_tokens if self._window else 0

    @property
    def first_held(self) -> int:
        """The first position whose keys and values are still here."""
        return self._base

    def begin(self, position: int) -> None:
        """Let an empty layer begin at `position`: what came before is not needed."""
        assert self._keys is None, "the layer has begun"
        self._base = self._length = position

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Store the next tokens' keys and values."""
        num_tokens = keys.shape[2]
        self._reserve(num_tokens, keys, values)
        assert self._keys is not None
        assert self._values is not None
        at = self._length - self._base
        self._keys[..., at : at + num_tokens, :] = rounded(keys, self._keys.dtype)
        self._values[..., at : at + num_tokens, :] = rounded(values, self._values.dtype)
        self._length += num_tokens

    def room(self, num_tokens: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """The buffers, with room for the next tokens, and the position that they begin with.

        `keys` and `values` show how many heads there are, of what size and type.
        """
        self._reserve(num_tokens, keys, values)
        return self.stored()

    def room_for_next(self, num_tokens: int) -> tuple[mx.array, mx.array, int]:
        """The buffers, evaluated, with room for so many more tokens behind those that are stored."""
        keys, values, _ = self.stored()
        self._reserve(num_tokens, keys, values)
        if self._keys is not keys:
            mx.eval(self.arrays())
        return self.stored()

    def stored(self) -> tuple[mx.array, mx.array, int]:
        """The buffers, and the position that they begin with."""
        assert self._keys is not None, "nothing is stored yet"
        assert self._values is not None
        return self._keys, self._values, self._base

    def written(self, num_tokens: int, keys: mx.array, values: mx.array) -> None:
        """Go on with these buffers, into which a kernel has put the next tokens."""
        self._keys, self._values = keys, values
        self.wrote(num_tokens)

    def wrote(self, num_tokens: int) -> None:
        """The next tokens are in the buffers already."""
        self._length += num_tokens

    def rewind(self, num_tokens: int) -> None:
        """Forget the last tokens: fewer than were stored at once, or no more than are spare. Then what a window
        has let go is not needed again.
        """
        self._length -= num_tokens
        needed = max(0, self._length + 1 - self._window) if self._window else 0
        assert self._base <= min(needed, self._length), "a row is rewound to where it holds what it sees"

    def view(self, first_position: int) -> tuple[mx.array, mx.array]:
        """Keys and values from `first_position` to the last stored, in the type that they are stored in."""
        assert first_position >= self._base, "these positions have left the window"
        return self.between(first_position, self._length)

    def between(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the positions `start` to `stop`, as they are stored."""
        assert self._keys is not None, "nothing is stored yet"
        assert self._values is not None
        assert self._base <= start <= stop <= self._length, "these positions are not held"
        within = slice(start - self._base, stop - self._base)
        return self._keys[..., within, :], self._values[..., within, :]

    def arrays(self) -> list[mx.array]:
        return [buffer for buffer in (self._keys, self._values) if buffer is not None]

    def _reserve(self, num_tokens: int, keys: mx.array, values: mx.array) -> None:
        used = self._length - self._base
        if self._keys is not None and used + num_tokens <= self._keys.shape[2]:
            return
        kept = min(used, self.num_kept) if self._window else used
        capacity = kept + num_tokens + kept // 4
        capacity = -(-capacity // GROWTH_TOKENS) * GROWTH_TOKENS
        self._keys = self._moved(self._keys, keys, used, kept, capacity)
        self._values = self._moved(self._values, values, used, kept, capacity)
        self._base = self._length - kept

    def _moved(self, buffer: mx.array | None, like: mx.array, used: int, kept: int, capacity: int) -> mx.array:
        """A larger buffer that begins with the last `kept` of `used` tokens."""
        shape = (1, like.shape[1], capacity - kept, like.shape[3])
        room = mx.zeros(shape, self._dtype or like.dtype)
        if buffer is None or kept == 0:
            return room
        return mx.concatenate([buffer[..., used - kept : used, :], room], axis=2)


class StateLayer:
    """The recurrent state of one layer of one row: arrays `[1, ...]`, None until the first token."""

    __slots__ = ("entries",)

    def __init__(self, kind: LayerKind) -> None:
        self.entries: list[mx.array | None] = [None] * kind.size

    def arrays(self) -> list[mx.array]:
        return [entry for entry in self.entries if entry is not None]


class ListLayer:
    """A layer that keeps several things."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts


def new_layer(kind: LayerKind, attention: Callable[[LayerKind], Any]) -> Any:
    """Empty storage for a layer of this kind; `attention` makes that of keys and values."""
    match kind.name:
        case "state":
            return StateLayer(kind)
        case "list":
            return ListLayer([new_layer(part, attention) for part in kind.parts])
    assert kind.is_attention, f"no storage is known for {kind.cache_class}"
    return attention(kind)


def leaves_of(layers: Sequence[Any]) -> list[Any]:
    """Every layer that is not a list, parts of lists included, in their order."""
    return [
        leaf for layer in layers for leaf in (leaves_of(layer.parts) if isinstance(layer, ListLayer) else [layer])
    ]


class DenseStorage:
    """A row's dense state over all layers; keys and values are stored as `dtype`, or as what they are.

    Windows keep `spare_tokens` more than they see, so that the row can be rewound by as many. `logits` are those
    behind all that is stored, `[1, vocab]`, where somebody is to go on from here without them.
    """

    __slots__ = ("__weakref__", "layers", "length", "logits")

    def __init__(self, kinds: Sequence[LayerKind], dtype: mx.Dtype | None = None, spare_tokens: int = 0) -> None:
        self.layers = [new_layer(kind, lambda kind: DenseLayer(kind, dtype, spare_tokens)) for kind in kinds]
        self.length = 0
        self.logits: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        return [array for leaf in self.leaves() for array in leaf.arrays()]

    def rewind(self, num_tokens: int) -> None:
        """Forget the last tokens, of those that the last forward has stored and not all of them."""
        for layer in self.leaves():
            assert isinstance(layer, DenseLayer), "a recurrent state has nothing to go back to"
            layer.rewind(num_tokens)
        self.length -= num_tokens

    def free(self) -> None:
        """Nothing is shared: what is not used any more is not there any more."""

    @property
    def first_held(self) -> int:
        """The first position that every layer still holds."""
        return max((layer.first_held for layer in self.attention_layers()), default=0)

    def attention_layers(self) -> list[DenseLayer]:
        """The layers that keep keys and values, parts of others included, in their order."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, DenseLayer)]

    def leaves(self) -> list[DenseLayer | StateLayer]:
        """Every layer that is not a list, parts of lists included, in their order."""
        return leaves_of(self.layers)
