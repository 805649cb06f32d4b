"""The one forward, over spans, in the mode that the model allows; the mode is found by trying it at load.

`spans`: all tokens of all rows are rows of one model call, and attention regroups them (`cache/attend.py`).
`alone`: one call per row with mlx-lm's own caches, evaluated together; works for every family.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from engine.cache.adapter import HeadSelection, SequenceStorage, layer_kinds, select_before_head
from engine.cache.attend import Batch, Place, SpanLayer
from engine.cache.rows import DenseStorage, RowStorage

PROBE_TOLERANCE = {mx.float32: 1e-3}
PROBE_TOLERANCE_HALF = 5e-2


@dataclass(frozen=True, slots=True)
class Span:
    """A row's next tokens: ids, or an int array `[n]` whose values nobody has read yet.

    `sample` asks for the logits after the last of them.
    """

    storage: Any
    tokens: Sequence[int] | mx.array
    sample: bool

    @property
    def count(self) -> int:
        return self.tokens.size if isinstance(self.tokens, mx.array) else len(self.tokens)

    def ids(self) -> mx.array:
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array(list(self.tokens), mx.int32)


class Forward(Protocol):
    """One way to run spans. `on_grid`: results depend on where a prompt is cut."""

    name: str
    on_grid: bool
    batches: bool

    def open(self) -> RowStorage:
        """Storage for a new row."""
        ...

    def run(self, spans: Sequence[Span]) -> mx.array:
        """Logits `[S, vocab]` of the S sampling spans, unevaluated; every span's storage is advanced."""
        ...


class SpansForward:
    """Tokens as rows: input `[T, 1]`."""

    name = "spans"
    on_grid = False
    batches = True

    def __init__(self, model: Any, selection: HeadSelection) -> None:
        self._model = model
        self._selection = selection
        self._kinds = layer_kinds(model)
        strangers = {kind.cache_class for kind in self._kinds if not kind.is_attention}
        if strangers:
            raise ValueError(f"layers keep {', '.join(sorted(strangers))}")

    def open(self) -> DenseStorage:
        return DenseStorage(self._kinds)

    def run(self, spans: Sequence[Span]) -> mx.array:
        places, start = [], 0
        for span in spans:
            places.append(Place(start, span.count, span.storage.length))
            start += span.count
        batch = Batch(places)
        caches = [SpanLayer(batch, [span.storage.layers[i] for span in spans]) for i in range(len(self._kinds))]
        ids = mx.concatenate([span.ids() for span in spans])[:, None]
        ends = [place.start + place.count - 1 for place, span in zip(places, spans, strict=True) if span.sample]
        with self._selection.of(ends, axis=0):
            logits: mx.array = self._model(ids, cache=caches)
        for span in spans:
            span.storage.length += span.count
        return _only(logits[:, -1, :], ends)


class AloneForward:
    """One row per model call: input `[1, n]`."""

    name = "alone"
    on_grid = True
    batches = False

    def __init__(self, model: Any, selection: HeadSelection) -> None:
        self._model = model
        self._selection = selection

    def open(self) -> SequenceStorage:
        return SequenceStorage(self._model)

    def run(self, spans: Sequence[Span]) -> mx.array:
        logits = []
        for span in spans:
            last = [span.count - 1] if span.sample else []
            with self._selection.of(last, axis=1):
                row_logits = self._model(span.ids()[None], cache=span.storage.caches)[0]
            logits.append(_only(row_logits, last))
            span.storage.length += span.count
        return mx.concatenate(logits, axis=0)


def _only(logits: mx.array, wanted: Sequence[int]) -> mx.array:
    """The wanted rows of `[n, vocab]`, where the model's head was not found and ran on every token."""
    return logits if logits.shape[0] == len(wanted) else logits[mx.array(list(wanted), mx.int32)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The mode chosen, why, and the prefill rate seen while trying."""

    forward: Forward
    reason: str
    tokens_per_s: float


def choose_forward(model: Any, vocab_size: int) -> Verdict:
    """Run two short rows together in `spans` and each alone; `spans` wins if the logits agree."""
    selection = select_before_head(model, vocab_size)
    alone = AloneForward(model, selection)
    started_s = time.perf_counter()
    reference = _probe(alone, vocab_size, together=False)
    tokens_per_s = _PROBE_TOKENS / (time.perf_counter() - started_s)
    try:
        spans = SpansForward(model, selection)
        together = _probe(spans, vocab_size, together=True)
    except Exception as fault:  # noqa: BLE001 - a model's code may raise anything; the verdict says what
        return Verdict(alone, f"spans: {fault}", tokens_per_s)
    worst = _largest(together - reference) / max(_largest(reference), 1e-9)
    if not worst <= PROBE_TOLERANCE.get(reference.dtype, PROBE_TOLERANCE_HALF):
        return Verdict(alone, f"spans: two rows together differ from each alone by {worst:.1e}", tokens_per_s)
    exactly = "exactly" if worst == 0 else f"within {worst:.1e}"
    return Verdict(spans, f"two rows together equal each alone {exactly}", tokens_per_s)


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max().item())  # type: ignore[arg-type]


_PROBE_LENGTHS = (2, 4)
_PROBE_TOKENS = sum(_PROBE_LENGTHS) + 1


def _probe(forward: Forward, vocab_size: int, *, together: bool) -> mx.array:
    """Logits of two rows: the first one's prompt, then its first step beside the other one's prompt."""
    short, long = ([(7 * i + n) % vocab_size for i in range(n)] for n in _PROBE_LENGTHS)
    first, second = forward.open(), forward.open()
    logits = [forward.run([Span(first, short, sample=True)])]
    steps = [Span(first, [11 % vocab_size], sample=True), Span(second, long, sample=True)]
    logits += [forward.run(steps)] if together else [forward.run([span]) for span in steps]
    result = mx.concatenate(logits, axis=0)
    mx.eval(result)
    return result
