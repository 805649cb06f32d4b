"""What a model finds where it expects its caches, when its layers cannot all be served by handles.

`GatheredLayer` is for one new token of each of several rows: their keys side by side, padded behind, with a mask.
`SequenceLayer` is for the next tokens of one row. Both store in the rows' own layers, as `attend.SpanLayer` does;
what is built for the model lives for one forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.cache import adapter
from engine.cache.attend import AttentionView
from engine.cache.rows import DenseLayer, ListLayer, StateLayer


def view_of(layers: Sequence[Any], attention: Callable[[Sequence[Any]], Any]) -> Any:
    """What the model finds for one entry of its cache list; `attention` makes the view of keys and values."""
    first = layers[0]
    if isinstance(first, ListLayer):
        parts = zip(*(layer.parts for layer in layers if isinstance(layer, ListLayer)), strict=True)
        return adapter.list_view([view_of(part, attention) for part in parts])
    if isinstance(first, StateLayer):
        return adapter.state_view([layer for layer in layers if isinstance(layer, StateLayer)])
    return attention(layers)


def keep_states_of(view: Any, layers: Sequence[Any]) -> None:
    """Give the recurrent states that the model left in `view` back to their rows."""
    first = layers[0]
    if isinstance(first, ListLayer):
        parts = zip(*(layer.parts for layer in layers if isinstance(layer, ListLayer)), strict=True)
        for number, part in enumerate(parts):
            keep_states_of(view[number], part)
    elif isinstance(first, StateLayer):
        adapter.keep_states(view, [layer for layer in layers if isinstance(layer, StateLayer)])


class GatheredLayer(AttentionView):
    """One layer's keys and values of B rows, each with one new token: `[B, heads, longest, head_dim]`.

    `num_axes` are those of the scores that the model masks: rows first, keys last.
    """

    def __init__(self, layers: Sequence[DenseLayer], positions: mx.array, *, num_axes: int) -> None:
        self._layers = layers
        self._num_axes = num_axes
        self.offset = positions
        self._seen = [_seen(layer, layer.length + 1) for layer in layers]
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def make_mask(
        self, num_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Which of the gathered keys each row sees: bool `[B, 1, …, longest]`, or None where all see all."""
        assert num_queries == 1, "gathered rows have one new token each"
        if not window_size and len(set(self._seen)) == 1:
            return None
        seen = mx.array(self._seen)[:, None]
        keys = mx.arange(max(self._seen))[None]
        mask = keys < seen
        if window_size:
            mask = mask & (keys >= seen - window_size)
        return mask.reshape(len(self._seen), *[1] * (self._num_axes - 2), -1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store each row's new token and gather what each row sees."""
        gathered = []
        for row, (layer, seen) in enumerate(zip(self._layers, self._seen, strict=True)):
            layer.append(keys[row : row + 1], values[row : row + 1])
            stored_keys, stored_values = layer.view(layer.length - seen)
            gathered.append((stored_keys.astype(keys.dtype), stored_values.astype(values.dtype)))
        longest = max(self._seen)
        self._keys = mx.concatenate([_padded(keys, longest) for keys, _ in gathered])
        self._values = mx.concatenate([_padded(values, longest) for _, values in gathered])
        return self._keys, self._values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """What the last `update_and_fetch` gave, for layers that share it."""
        return self._keys, self._values


class SequenceLayer(AttentionView):
    """One layer's keys and values of one row, which takes its next tokens: `[1, heads, n, head_dim]`."""

    def __init__(self, layer: DenseLayer) -> None:
        self._layer = layer
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def offset(self) -> int:
        return self._layer.length

    def make_mask(
        self, num_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Causal over what `update_and_fetch` will give, within the smaller of both windows."""
        window = min(filter(None, (window_size, self._layer.window)), default=0)
        before = self._num_before()
        if num_queries == 1 and (not window or before < window):
            return None
        if not return_array and (not window or before + num_queries <= window):
            return "causal"
        queries = mx.arange(before, before + num_queries)[:, None]
        keys = mx.arange(before + num_queries)[None]
        mask = keys <= queries
        return mask & (keys > queries - window) if window else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the tokens; return them behind those that the first of them still sees."""
        first = self._layer.length - self._num_before()
        self._layer.append(keys, values)
        stored_keys, stored_values = self._layer.view(first)
        self._keys, self._values = stored_keys.astype(keys.dtype), stored_values.astype(values.dtype)
        return self._keys, self._values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """What the last `update_and_fetch` gave, for layers that share it."""
        return self._keys, self._values

    def _num_before(self) -> int:
        return _seen(self._layer, self._layer.length + 1) - 1


def _seen(layer: DenseLayer, length: int) -> int:
    """How many of `length` tokens the last of them sees in this layer."""
    return min(length, layer.window) if layer.window else length


def _padded(rows: mx.array, longest: int) -> mx.array:
    missing = longest - rows.shape[2]
    return mx.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else rows
