"""Which attention runs: tokens as rows, regrouped by the row of the batch they belong to.

An unmodified mlx-lm model is called with input `[T, 1]`: T tokens of any rows, in spans. Where it expects its
caches it finds `SpanLayer`s. Their `update_and_fetch` stores each span's keys and values with its row and
returns handles in place of arrays; the attention call recognizes a handle by its type and comes back here. So a
row's attention is the same computation alone or in company, and no mask or padding joins rows of any length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.pages import PagedLayer
from engine.cache.rows import DenseLayer
from engine.kernels import functions, native

Sdpa = Callable[..., mx.array]


class UnsupportedAttention(Exception):
    """The model asks its cache or its attention for something that spans cannot give."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one span lies: `start` and `count` in the T tokens, `position` of its first token in its row."""

    start: int
    count: int
    position: int


class Batch:
    """The spans of one forward, and what all layers share: positions, masks, and block tables by their group."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)
        self.tables: dict[int, list[mx.array]] = {}
        self.by_row = False  # whether an attention went row by row
        self._masks: dict[tuple[int, int, int, int], mx.array] = {}

    @property
    def num_tokens(self) -> int:
        return sum(place.count for place in self.places)

    @cached_property
    def positions(self) -> mx.array:
        """Position of each of the T tokens in its row: int32 `[T]`."""
        return mx.array([place.position + i for place in self.places for i in range(place.count)], mx.int32)

    def mask(self, place: Place, first_key: int, window: int) -> mx.array | str | None:
        """What the queries of `place` may see of the keys from `first_key` to their own last."""
        if place.count == 1:
            return None
        last = place.position + place.count
        if not window or last - first_key <= window:
            return "causal"
        known = (place.position, place.count, first_key, window)
        if known not in self._masks:
            queries = mx.arange(place.position, last)[:, None]
            keys = mx.arange(first_key, last)[None]
            self._masks[known] = (keys <= queries) & (keys > queries - window)
        return self._masks[known]


@dataclass(frozen=True, slots=True)
class WindowMask:
    """What a model gets where it asks for a mask with a window; it can only be handed on to the attention."""

    window: int


class AttentionView:
    """What a model finds in place of one layer's cache. There are no arrays in it to read or to put others in."""

    @property
    def keys(self) -> mx.array:
        raise UnsupportedAttention("the model reads its cache's arrays itself")


class SpanLayer(AttentionView):
    """One layer's cache as the model sees it, for one forward."""

    def __init__(self, batch: Batch, layers: Sequence[Any]) -> None:
        self._batch = batch
        self._layers = layers  # of each span's row: all dense, or all paged
        self._shown: tuple[tuple[tuple[int, ...], mx.Dtype], ...] = ()  # not the handles, which hold this layer
        self._unwritten: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each token, for the rotary embedding: int32 `[T]`."""
        return self._batch.positions

    def make_mask(
        self, num_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        if num_queries != 1 or return_array:
            raise UnsupportedAttention("the model wants its mask as an array")
        return WindowMask(window_size) if window_size else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple["Handle", "Handle"]:
        """Store keys and values of `[T, heads, 1, head_dim]`, each span's with its row.

        The compiled kernel stores them when it attends.
        """
        self._unwritten = keys, values
        if not (functions.in_use() and keys.dtype == values.dtype == mx.float32):
            self._write()
        self._shown = (keys.shape, keys.dtype), (values.shape, values.dtype)
        return self.keys_and_values()

    def _write(self) -> None:
        if self._unwritten is None:
            return
        (keys, values), self._unwritten = self._unwritten, None
        for place, layer in zip(self._batch.places, self._layers, strict=True):
            span = slice(place.start, place.start + place.count)
            layer.append(_to_sequence(keys[span]), _to_sequence(values[span]))

    def keys_and_values(self) -> tuple["Handle", "Handle"]:
        """What `update_and_fetch` gave, for layers that share it."""
        if not self._shown:
            raise UnsupportedAttention("a layer shares keys that are not stored yet")
        keys, values = self._shown
        return Handle(self, *keys), Handle(self, *values)

    def attend(self, queries: mx.array, sdpa: Sdpa, dtype: mx.Dtype, mask: Any, **options: Any) -> mx.array:
        """Attention of `queries` `[T, heads, 1, head_dim]`, each span over its own row's keys and values."""
        if not (mask is None or isinstance(mask, WindowMask)):
            raise UnsupportedAttention("the model made a mask of its own")
        if queries.shape[0] != self._batch.num_tokens or queries.shape[2] != 1:
            raise UnsupportedAttention(f"queries of shape {queries.shape} are not one token a row")
        asked = mask.window if mask is not None else 0
        if functions.in_use() and queries.dtype == dtype == mx.float32 and options.keys() <= {"scale", "sinks"}:
            return self._attend_compiled(queries, asked, **options)
        self._write()
        self._batch.by_row = True
        outputs = []
        window = self._window(asked)
        for place, layer in zip(self._batch.places, self._layers, strict=True):
            first_key = max(0, place.position + 1 - window) if window else 0
            keys, values = (array.astype(dtype) for array in layer.view(first_key))
            span = _to_sequence(queries[place.start : place.start + place.count])
            seen = self._batch.mask(place, first_key, window)
            outputs.append(_to_rows(sdpa(span, keys, values, mask=seen, **options)))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def _window(self, asked: int) -> int:
        """The smaller of the layer's own window and the one that the model asks for; 0: none."""
        return min(filter(None, (self._layers[0].window, asked)), default=0)

    def _attend_compiled(
        self, queries: mx.array, asked: int, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """All spans in one call of the kernel, which also stores what is not stored yet."""
        new, self._unwritten = self._unwritten, None
        storage: list[mx.array] = []
        places = []
        for place, layer in zip(self._batch.places, self._layers, strict=True):
            keys, values, base = layer.room(place.count, *new) if new else layer.stored()
            storage += (keys, values)
            places.append((place.start, place.count, place.position, base))
        window = self._window(asked)
        output, *written = native.attend(queries, new, storage, places, scale, window, sinks)
        for i, (place, layer) in enumerate(zip(self._batch.places, self._layers, strict=True)):
            if written:
                layer.written(place.count, written[2 * i], written[2 * i + 1])
        return output


class PagedSpanLayer(SpanLayer):
    """One layer of rows whose keys and values lie in blocks of a pool."""

    def __init__(self, batch: Batch, layers: Sequence[Any]) -> None:
        super().__init__(batch, layers)
        self._written: list[mx.array] = []  # the pools of this forward, once it has written to them

    def _attend_compiled(
        self, queries: mx.array, asked: int, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        first: PagedLayer = self._layers[0]
        new, self._unwritten = self._unwritten, None
        if new:
            first.room(*new)
        keys, values = self._written or first.pool.arrays()
        places = [
            (place.start, place.count, place.position, layer.table.base)
            for place, layer in zip(self._batch.places, self._layers, strict=True)
        ]
        if first.group not in self._batch.tables:
            tables = [mx.array(np.frombuffer(layer.table.numbers, np.int32)) for layer in self._layers]
            self._batch.tables[first.group] = tables
        output, *written = native.attend_paged(
            queries,
            new,
            (keys, values),
            self._batch.tables[first.group],
            places,
            scale,
            self._window(asked),
            sinks,
        )
        if written:
            # The pools' own arrays stay: they are written in place, and after a fault nothing is left of this.
            self._written = written
            first.pages.written += written
            for place, layer in zip(self._batch.places, self._layers, strict=True):
                layer.wrote(place.count)
        return output


class RecordedLayer(SpanLayer):
    """One layer's cache while a decode step is recorded: its number stands for the storage of all rows."""

    def __init__(self, batch: Batch, layer: DenseLayer | PagedLayer, number: int) -> None:
        super().__init__(batch, [layer])
        self._number = number
        self._new: tuple[mx.array, mx.array] | None = None

    def _write(self) -> None:
        raise UnsupportedAttention("only the compiled attention is recorded")

    def _attend_compiled(
        self, queries: mx.array, asked: int, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        appends = self._unwritten is not None
        self._new, self._unwritten = self._unwritten or self._new, None
        assert self._new is not None, "keys come before their attention"
        window = self._window(asked)
        return native.attend_in_recording(queries, self._new, appends, self._number, scale, window, sinks)


class Handle:
    """Stands for stored keys or values: it has a shape and a type and no numbers."""

    __slots__ = ("dtype", "layer", "ndim", "shape")

    def __init__(self, layer: SpanLayer, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.layer = layer
        self.shape = shape
        self.ndim = len(shape)
        self.dtype = dtype

    def astype(self, dtype: mx.Dtype) -> "Handle":
        return Handle(self.layer, self.shape, dtype)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedAttention(f"the model asks for {name} of its keys")


def dispatching(sdpa: Sdpa) -> Sdpa:
    """Wrap the attention function `sdpa`: a call whose keys are a handle is run by the handle's layer."""

    def attention(queries: mx.array, keys: Any, values: Any, **options: Any) -> mx.array:
        if isinstance(keys, Handle):
            return keys.layer.attend(queries, sdpa, keys.dtype, options.pop("mask", None), **options)
        return sdpa(queries, keys, values, **options)

    attention.dispatches_handles = True  # type: ignore[attr-defined]
    return attention


def _to_sequence(rows: mx.array) -> mx.array:
    """Tokens as rows `[n, heads, 1, dim]` to one sequence `[1, heads, n, dim]`."""
    return rows if rows.shape[0] == 1 else rows.transpose(2, 1, 0, 3)


def _to_rows(sequence: mx.array) -> mx.array:
    """One sequence `[1, heads, n, dim]` to tokens as rows `[n, heads, 1, dim]`."""
    return sequence if sequence.shape[2] == 1 else sequence.transpose(2, 1, 0, 3)
