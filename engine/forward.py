"""The one forward, over spans, in the mode that the model allows (`probe.py` finds which).

`spans`: all tokens of all rows are rows of one model call, and attention regroups them (`cache/attend.py`).
`rows`: one new token of each row in one call over the rows' own state; prompts run one row per call.
`alone`: one call per row with mlx-lm's own caches, evaluated together; works for every family.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from engine.adapters.layer import BASE, Choice
from engine.cache.adapter import HeadSelection, SequenceStorage, layer_kinds
from engine.cache.attend import Batch, PagedSpanLayer, Place, SpanLayer
from engine.cache.kinds import LayerKind
from engine.cache.pages import PagedStorage, Pages
from engine.cache.rows import DenseLayer, DenseStorage, RowStorage
from engine.cache.views import GatheredLayer, SequenceLayer, keep_states_of, view_of
from engine.kernels import functions
from engine.launches import Launches
from engine.recorded import RecordedSteps

MAX_STEP_TOKENS = 32  # of one row that a recorded step takes; more are a prompt's


class ModeUnfit(Exception):
    """The model's layers keep something that this mode cannot."""


class HeadNotFound(Exception):
    """The model has no output head that could be seen, so its hidden states are not known."""


class Pools(Protocol):
    """Whoever wants the hidden states of a row's tokens."""

    def take(self, hidden: mx.array) -> None:
        """Those of its next tokens, `[n, size]`, unevaluated."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """A row's next tokens: ids, or an int array `[n]` whose values nobody has read yet.

    `num_sampled`: behind how many of the last of them logits are wanted. Without tokens they are those that the
    storage came with. `pooled` is given the hidden states of all of them, in front of the output head. `adapter`
    is the slot of that of the row.
    """

    storage: Any
    tokens: Sequence[int] | mx.array
    num_sampled: int
    pooled: Pools | None = None
    adapter: int = BASE

    @property
    def count(self) -> int:
        return self.tokens.size if isinstance(self.tokens, mx.array) else len(self.tokens)

    @property
    def is_step(self) -> bool:
        """Whether these are few known tokens behind others, and logits are wanted behind each of them."""
        return (
            not isinstance(self.tokens, mx.array)
            and self.num_sampled == len(self.tokens) <= MAX_STEP_TOKENS
            and self.storage.length > 0
        )

    def ids(self) -> mx.array:
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array(list(self.tokens), mx.int32)


class Forward(Protocol):
    """One way to run spans. `on_grid`: results depend on where a prompt is cut; without `cuts` it must not be.

    Where `stores` says that rows of ours keep keys and values, `cache_dtype` is the type that they are stored in,
    or None: their own. `by_handles`: attention is run on what is stored, not on arrays given to the model.
    `kinds`: what each entry of a row's storage keeps, where the rows are ours. With `pages`, new rows are paged.
    Adapted layers look at `choice` while the model is called.
    """

    name: str
    on_grid: bool
    cuts: bool
    batches: bool
    cache_dtype: mx.Dtype | None
    stores: bool
    by_handles: bool
    kinds: Sequence[LayerKind]
    pages: Pages | None
    launches: Launches
    choice: Choice

    def open(self) -> RowStorage:
        """Storage for a new row."""
        ...

    def open_dense(self) -> RowStorage:
        """Storage for a new row that shares nothing."""
        ...

    def run(self, spans: Sequence[Span]) -> mx.array:
        """Logits `[S, vocab]` behind the S sampled tokens, unevaluated; every span's storage is advanced.

        Raises HeadNotFound where hidden states are wanted and not known.
        """
        ...

    def changed(self) -> None:
        """Other adapters are mounted than before: forget what was kept of forwards with adapters."""
        ...


class SpansForward:
    """Tokens as rows: input `[T, 1]`."""

    name = "spans"
    on_grid = False
    cuts = True
    batches = True
    cache_dtype: mx.Dtype | None = None
    stores = True
    by_handles = True
    pages: Pages | None = None

    def __init__(self, model: Any, selection: HeadSelection) -> None:
        self._model = model
        self._selection = selection
        self.kinds: Sequence[LayerKind] = layer_kinds(model)
        _refuse(self.kinds, lambda kind: kind.is_attention)
        self.launches = Launches()
        self.choice = Choice()
        self._recorded = RecordedSteps(model, self.kinds, self.choice) if functions.are_used_by(model) else None

    def open(self) -> DenseStorage | PagedStorage:
        return self.pages.open() if self.pages else self.open_dense()

    def open_dense(self) -> DenseStorage:
        return DenseStorage(self.kinds, self.cache_dtype)

    def run(self, spans: Sequence[Span]) -> mx.array:
        for span in spans:
            if isinstance(span.storage, PagedStorage):
                span.storage.reserve(span.count)
        if self._recorded is None or not all(span.is_step for span in spans):
            return self._run(spans)
        if len({span.adapter for span in spans}) == 1:
            return self._run_recorded(self._recorded, spans)
        # As few recordings as may be: rows of one adapter follow each other.
        order = sorted(range(len(spans)), key=lambda place: spans[place].adapter)
        logits = self._run_recorded(self._recorded, [spans[place] for place in order])
        return logits[mx.array(_places_before(spans, order), mx.int32)]

    def changed(self) -> None:
        if self._recorded is not None:
            self._recorded.forget_adapted()

    def _run_recorded(self, recorded: RecordedSteps, spans: Sequence[Span]) -> mx.array:
        slots = _slots(spans)
        if not recorded.is_for(slots):
            return self._run(spans)
        steps = [[int(token) for token in span.tokens] for span in spans]
        logits = recorded.logits(steps, [span.storage for span in spans], lambda: self._run(spans), adapters=slots)
        if recorded.reason is None:
            self.launches.count(f"{_kept(spans)}_recorded", (span.storage for span in spans))
        return logits

    def profile(self, rows: Sequence[DenseStorage] | Sequence[PagedStorage]) -> dict[str, tuple[int, float]]:
        """How often each operation of a decode step ran, and for how many seconds; the rows must have stepped."""
        assert self._recorded is not None, "only recorded steps are taken apart"
        return self._recorded.profile(rows)

    def _run(self, spans: Sequence[Span]) -> mx.array:
        batch = Batch(_places(spans))
        layer: type[SpanLayer] = PagedSpanLayer if _kept(spans) == "paged" else SpanLayer
        caches = _views(spans, lambda layers: layer(batch, layers))
        ids = mx.concatenate([span.ids() for span in spans])[:, None]
        ends = [place.start + at for place, span in zip(batch.places, spans, strict=True) for at in _sampled(span)]
        with self._selection.of(ends, axis=0) as hidden, self.choice.of(_slots(spans)):
            logits: mx.array = self._model(ids, cache=caches)
            pool(spans, hidden, axis=0)
        _advance(spans)
        way = "by_row" if batch.by_row else "fused"
        self.launches.count(f"{_kept(spans)}_{way}", (span.storage for span in spans))
        return _only(logits[:, -1, :], ends)


class RowsForward:
    """Decode `[B, 1]` over the rows' own state, prompts `[1, n]`.

    Recurrent states are stacked for a step and given back. Attention is run by handles or, for models that look at
    their keys, over keys padded behind and masked; `gathered` is then the number of axes of the scores that the
    model masks: 4 (row, head, query, key), 5 where heads are in groups, 0 for handles.
    """

    name = "rows"
    on_grid = True
    cuts = True
    batches = True
    cache_dtype: mx.Dtype | None = None
    pages: Pages | None = None

    def __init__(self, model: Any, selection: HeadSelection, *, gathered: int = 0) -> None:
        self._model = model
        self._selection = selection
        self._gathered = gathered
        self.choice = Choice()
        self.launches = Launches()
        self.kinds: Sequence[LayerKind] = layer_kinds(model)
        _refuse(self.kinds, lambda kind: kind.is_known)
        self.stores = any(kind.has_attention for kind in self.kinds)
        self.by_handles = self.stores and not gathered

    def open(self) -> DenseStorage:
        return DenseStorage(self.kinds, self.cache_dtype)

    def open_dense(self) -> DenseStorage:
        return self.open()

    def run(self, spans: Sequence[Span]) -> mx.array:
        together = [span for span in spans if span.count == 1 and span.storage.length > 0]
        logits = {id(span): span.storage.logits for span in spans if not span.count}
        if together:
            logits |= zip(map(id, together), self._decode(together), strict=True)
        for span in spans:
            if id(span) not in logits:
                logits[id(span)] = self._prefill(span)
            if span.count:
                span.storage.logits = None
        wanted = [logits[id(span)] for span in spans if span.num_sampled]
        return mx.concatenate(wanted) if wanted else mx.zeros((0, 1))

    def changed(self) -> None:
        """Nothing is kept."""

    def _decode(self, spans: Sequence[Span]) -> list[mx.array]:
        """Logits `[1, vocab]` of each span."""
        batch = Batch(_places(spans))

        def attention(layers: Sequence[DenseLayer]) -> GatheredLayer | SpanLayer:
            if self._gathered:
                return GatheredLayer(layers, batch.positions, num_axes=self._gathered)
            return SpanLayer(batch, layers)

        caches = _views(spans, attention)
        ids = mx.concatenate([span.ids() for span in spans])[:, None]
        with self._selection.of(None, axis=0) as hidden, self.choice.of(_slots(spans)):
            logits = self._model(ids, cache=caches)[:, -1, :]
            pool(spans, hidden, axis=0)
        _keep(caches, spans)
        _advance(spans)
        way = "gathered" if self._gathered else "by_row" if batch.by_row else "fused"
        self.launches.count(f"dense_{way}", (span.storage for span in spans))
        return [logits[i : i + 1] for i in range(len(spans))]

    def _prefill(self, span: Span) -> mx.array:
        """Logits `[num_sampled, vocab]` of the span."""
        caches = _views([span], lambda layers: SequenceLayer(layers[0]))
        logits = _run_alone(self._model, self._selection, self.choice, span, caches)
        _keep(caches, [span])
        self.launches.count("alone", [span.storage])
        return logits


class AloneForward:
    """One row per model call: input `[1, n]`."""

    name = "alone"
    on_grid = True
    cuts = True
    batches = False
    cache_dtype: mx.Dtype | None = None
    stores = False
    by_handles = False
    kinds: Sequence[LayerKind] = ()
    pages: Pages | None = None

    def __init__(self, model: Any, selection: HeadSelection) -> None:
        self._model = model
        self._selection = selection
        self.choice = Choice()
        self.launches = Launches()

    def open(self) -> SequenceStorage:
        return SequenceStorage(self._model)

    def open_dense(self) -> SequenceStorage:
        return self.open()

    def run(self, spans: Sequence[Span]) -> mx.array:
        logits = [
            _run_alone(self._model, self._selection, self.choice, span, span.storage.caches) for span in spans
        ]
        self.launches.count("alone", (span.storage for span in spans))
        return mx.concatenate(logits, axis=0)

    def changed(self) -> None:
        """Nothing is kept."""


def _run_alone(
    model: Any, selection: HeadSelection, choice: Choice, span: Span, caches: Sequence[Any]
) -> mx.array:
    """One span as one sequence `[1, n]` over `caches`: logits `[num_sampled, vocab]`."""
    last = _sampled(span)
    with selection.of(last, axis=1) as hidden, choice.of([span.adapter]):
        logits: mx.array = model(span.ids()[None], cache=caches)[0]
        pool([span], hidden, axis=1)
    _advance([span])
    return _only(logits, last)


def _refuse(kinds: Sequence[LayerKind], fits: Callable[[LayerKind], bool]) -> None:
    strangers = {kind.cache_class for kind in kinds if not fits(kind)}
    if strangers:
        raise ModeUnfit(f"layers keep {', '.join(sorted(strangers))}")


def _kept(spans: Sequence[Span]) -> str:
    """How the rows of one forward are kept: all of them alike."""
    return "paged" if isinstance(spans[0].storage, PagedStorage) else "dense"


def _sampled(span: Span) -> list[int]:
    """Which of its tokens logits are wanted behind."""
    return list(range(span.count - span.num_sampled, span.count))


def _slots(spans: Sequence[Span]) -> list[int]:
    """That of every token's adapter."""
    return [span.adapter for span in spans for _ in range(span.count)]


def _places_before(spans: Sequence[Span], order: Sequence[int]) -> list[int]:
    """Where each sampled token of `spans` is among those of the spans taken in `order`."""
    starts, start = {}, 0
    for place in order:
        starts[place] = start
        start += spans[place].num_sampled
    return [starts[place] + at for place, span in enumerate(spans) for at in range(span.num_sampled)]


def _places(spans: Sequence[Span]) -> list[Place]:
    places, start = [], 0
    for span in spans:
        places.append(Place(start, span.count, span.storage.length))
        start += span.count
    return places


def _views(spans: Sequence[Span], attention: Callable[[Sequence[DenseLayer]], Any]) -> list[Any]:
    """The model's cache list over the layers of the spans' rows."""
    return [view_of(layers, attention) for layers in zip(*(span.storage.layers for span in spans), strict=True)]


def _keep(views: Sequence[Any], spans: Sequence[Span]) -> None:
    """Give recurrent states back to their rows."""
    for view, layers in zip(views, zip(*(span.storage.layers for span in spans), strict=True), strict=True):
        keep_states_of(view, layers)


def pool(spans: Sequence[Span], hidden: Sequence[mx.array], *, axis: int) -> None:
    """Give those who want them the `hidden` states that the model's head was given; `axis` is the tokens' own."""
    if all(span.pooled is None for span in spans):
        return
    if not hidden:
        raise HeadNotFound
    states = hidden[-1].squeeze(1 - axis)
    for span, place in zip(spans, _places(spans), strict=True):
        if span.pooled is not None:
            span.pooled.take(states[place.start : place.start + place.count])


def _advance(spans: Sequence[Span]) -> None:
    for span in spans:
        span.storage.length += span.count


def _only(logits: mx.array, wanted: Sequence[int]) -> mx.array:
    """The wanted rows of `[n, vocab]`, where the model's head was not found and ran on every token."""
    return logits if logits.shape[0] == len(wanted) else logits[mx.array(list(wanted), mx.int32)]
