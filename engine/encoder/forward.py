"""The forward of an encoder: whole texts, several in one call of the model, and no token behind any."""

from collections.abc import Sequence

import mlx.core as mx

from engine.adapters.layer import Choice
from engine.cache.kinds import LayerKind
from engine.cache.pages import Pages
from engine.encoder.encoder import Encoder
from engine.forward import Span, pool
from engine.launches import Launches


class NoStorage:
    """What a row keeps that keeps nothing; `length` counts its tokens."""

    __slots__ = ("__weakref__", "length")

    def __init__(self) -> None:
        self.length = 0

    def arrays(self) -> list[mx.array]:
        return []

    def free(self) -> None:
        """There is nothing."""


class WholeForward:
    """Each span is all of its row's tokens."""

    name = "whole"
    on_grid = False
    cuts = False
    batches = True
    cache_dtype: mx.Dtype | None = None
    stores = False
    by_handles = False
    kinds: Sequence[LayerKind] = ()
    pages: Pages | None = None

    def __init__(self, model: Encoder) -> None:
        self._model = model
        self.choice = Choice()
        self.launches = Launches()

    def open(self) -> NoStorage:
        return NoStorage()

    def open_dense(self) -> NoStorage:
        return NoStorage()

    def run(self, spans: Sequence[Span]) -> mx.array:
        assert not any(span.storage.length for span in spans), "a text is run whole"
        ids = mx.concatenate([span.ids() for span in spans])[None]
        pool(spans, [self._model(ids, lengths=[span.count for span in spans])], axis=1)
        for span in spans:
            span.storage.length = span.count
        self.launches.count("whole", (span.storage for span in spans))
        return mx.zeros((0, 1))

    def changed(self) -> None:
        """An encoder has no adapters beside it."""
