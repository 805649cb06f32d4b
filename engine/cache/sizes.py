"""What a row keeps in a model's layers, in bytes: for each token, beside them, and at its longest.

Read off mlx-lm's own caches after a forward that is built and never run, so it is right for every family.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.cache.adapter import SequenceStorage
from engine.cache.blocks import num_needed
from engine.cache.prefix import BLOCK_TOKENS
from engine.cache.rows import GROWTH_TOKENS
from engine.errors import UnsupportedModel
from engine.plan import ALONE_MAX_TOKENS

# Two prompts whose caches are compared: what grows with the tokens, and what does not. Multiples of the step in
# which mlx-lm's caches grow.
SHORT_TOKENS, LONG_TOKENS = 256, 512
BOUNDS = ("max_size", "chunk_size")


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` entries of the model's cache list that keep the same, each `token_bytes` for every token stored and
    `fixed_bytes` beside them.

    `full` keeps every token, `window` the last `window` of them, `state` none at all.
    """

    kind: Literal["full", "window", "state"]
    count: int
    token_bytes: int
    fixed_bytes: int = 0
    window: int = 0

    def stored_bytes(self, num_tokens: int) -> int:
        """What all of them keep of a row of `num_tokens`."""
        kept = min(num_tokens, self.window) if self.window else num_tokens
        return self.count * (self.fixed_bytes + self.token_bytes * kept)

    def held_bytes(self, num_tokens: int, piece_tokens: int = ALONE_MAX_TOKENS) -> int:
        """The most that their buffers take for such a row: they are made a quarter larger than what they hold, and
        a window's hold a whole prefill piece and a step of growth beside it."""
        kept = min(num_tokens, self.window + piece_tokens) if self.window else num_tokens
        capacity = -(-(kept + kept // 4) // GROWTH_TOKENS) * GROWTH_TOKENS
        if self.window:
            capacity += GROWTH_TOKENS
        return self.count * (self.fixed_bytes + self.token_bytes * capacity)


def row_bytes(layers: Iterable[Layers], num_tokens: int, piece_tokens: int = ALONE_MAX_TOKENS) -> int:
    """The most that the buffers of a row of `num_tokens` take, over all its layers."""
    return sum(group.held_bytes(num_tokens, piece_tokens) for group in layers)


def token_bytes(layers: Iterable[Layers]) -> int:
    """What each further token of a long row keeps: windows are full by then."""
    return sum(group.count * group.token_bytes for group in layers if group.kind == "full")


def block_bytes(layers: Iterable[Layers], window: int) -> int:
    """What one block takes in all layers that see `window` positions, 0: all."""
    return BLOCK_TOKENS * sum(group.count * group.token_bytes for group in layers if group.window == window)


def paged_row_bytes(layers: Sequence[Layers], num_tokens: int, piece_tokens: int = ALONE_MAX_TOKENS) -> int:
    """The most that the blocks of a row of `num_tokens` take, and one more: a shared one is copied to go on in."""
    windows = {group.window for group in layers}
    return sum(block_bytes(layers, w) * (num_needed(num_tokens, w, piece_tokens) + 1) for w in windows)


def layers_of(model: Any, kept_as: mx.Dtype | None = None) -> tuple[Layers, ...]:
    """What the entries of the model's cache list keep, equal ones together, in the order in which they come first.

    The parts of an entry that is a list count as entries; keys and values are kept in the type `kept_as`, or in
    their own. Raises UnsupportedModel.
    """
    entries = zip(_caches_after(model, SHORT_TOKENS), _caches_after(model, LONG_TOKENS), strict=True)
    counted = Counter(_layer(short, long, kept_as) for short, long in entries)
    return tuple(
        Layers(kind, count, token_bytes, fixed_bytes, window)
        for (kind, token_bytes, fixed_bytes, window), count in counted.items()
    )


def _layer(
    short: Any, long: Any, kept_as: mx.Dtype | None
) -> tuple[Literal["full", "window", "state"], int, int, int]:
    """Kind, bytes of each token, bytes beside them and window of one entry, seen after both prompts."""
    grown = _bytes(long) - _bytes(short)
    if grown and kept_as is not None:
        short_bytes, long_bytes = _bytes(short, kept_as), _bytes(long, kept_as)
    else:
        short_bytes, long_bytes = _bytes(short), _bytes(long)
    token_bytes = (long_bytes - short_bytes) // (LONG_TOKENS - SHORT_TOKENS)
    fixed_bytes = short_bytes - SHORT_TOKENS * token_bytes
    if not token_bytes:
        return "state", 0, fixed_bytes, 0
    window = next((value for name in BOUNDS if isinstance(value := getattr(short, name, None), int)), 0)
    return "window" if window else "full", token_bytes, fixed_bytes, window


def _caches_after(model: Any, num_tokens: int) -> list[Any]:
    """The caches after a prompt of `num_tokens` whose forward is built and not run, lists taken apart."""
    caches = SequenceStorage(model).caches
    try:
        model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModel(f"no forward of this model can be built: {error}") from error
    return [part for cache in caches for part in _parts(cache)]


def _parts(cache: Any) -> list[Any]:
    parts = getattr(cache, "caches", None)
    return [cache] if parts is None else [leaf for part in parts for leaf in _parts(part)]


def _bytes(cache: Any, kept_as: mx.Dtype | None = None) -> int:
    """What the cache holds, were its floats of the type `kept_as`."""
    if cache.empty():
        return 0
    leaves: Any = tree_flatten(cache.state)
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    floats = sum(array.size * (kept_as or array.dtype).size for array in arrays if is_float(array))
    return floats + sum(array.nbytes for array in arrays if not is_float(array))


def is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))
