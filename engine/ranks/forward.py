"""The forward that all ranks run: rank 0 tells the others its spans, then each runs them on its own part.

Every rank evaluates the same graph, and nothing else, in each of them, so that what MLX sends between them comes
in one order everywhere. Draws, grammars and text are rank 0's alone.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.cache import dtype
from engine.cache.adapter import select_before_head
from engine.cache.pages import Pages
from engine.cache.rows import RowStorage
from engine.errors import EngineStopped
from engine.forward import AloneForward, Forward, Span
from engine.model.split import Split
from engine.probe import Verdict, probe
from engine.ranks.messages import Begin, Run


def chosen(split: Split, model: Any, vocab_size: int) -> tuple[Forward, Verdict]:
    """The forward of a split model, found the same way on each rank at the same time."""
    if not split.in_turn:
        return probe(model, vocab_size)
    forward = AloneForward(model, select_before_head(model, vocab_size))
    run(forward, [Span(forward.open(), [1, 2, 3], num_sampled=1)], in_turn=True)
    return forward, Verdict("alone", "the ranks of a pipeline run one row after the other", 0.0)


def run(forward: Forward, spans: Sequence[Span], *, in_turn: bool) -> mx.array:
    """Logits `[S, vocab]` of the spans, evaluated; with `in_turn` one span after the other."""
    parts = [[span] for span in spans] if in_turn else [spans]
    logits = []
    for part in parts:
        logits.append(forward.run(part))
        mx.eval(logits[-1], [span.storage.arrays() for span in part])
    return mx.concatenate(logits) if len(logits) > 1 else logits[0]


class ToldForward:
    """Rank 0's forward. `tell` sends a message to every other rank, and `fail` is called with what makes going on
    impossible: once the others were told, they have to be joined.

    Rows are known to the others by numbers; that a row has ended travels with the next forward.
    """

    pages: Pages | None = None

    def __init__(
        self,
        forward: Forward,
        *,
        mode: str,
        in_turn: bool,
        tell: Callable[[Begin | Run], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._forward = forward
        self._mode = mode
        self._in_turn = in_turn
        self._tell = tell
        self._fail = fail
        self._begun = False
        self._numbers: weakref.WeakKeyDictionary[RowStorage, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._gone: list[int] = []
        self.name, self.on_grid, self.batches = forward.name, forward.on_grid, forward.batches
        self.stores, self.by_handles = forward.stores, forward.by_handles
        self.kinds, self.launches = forward.kinds, forward.launches

    @property
    def cache_dtype(self) -> mx.Dtype | None:
        return self._forward.cache_dtype

    @cache_dtype.setter
    def cache_dtype(self, kept_as: mx.Dtype | None) -> None:
        self._forward.cache_dtype = kept_as

    def open(self) -> RowStorage:
        return self._numbered(self._forward.open())

    def open_dense(self) -> RowStorage:
        return self._numbered(self._forward.open_dense())

    def run(self, spans: Sequence[Span]) -> mx.array:
        """As `Forward.run`, on every rank, evaluated."""
        try:
            self._tell_of(spans)
            return run(self._forward, spans, in_turn=self._in_turn)
        except Exception as fault:
            self._fail(fault)
            raise

    def _numbered(self, storage: RowStorage) -> RowStorage:
        number = next(self._next_number)
        self._numbers[storage] = number
        weakref.finalize(storage, self._gone.append, number).atexit = False
        return storage

    def _tell_of(self, spans: Sequence[Span]) -> None:
        if not self._begun:
            self._begun = True
            kept_as = "" if self.cache_dtype is None else dtype.name_of(self.cache_dtype)
            self._tell(Begin(self._mode, kept_as))
        gone = list(self._gone)
        del self._gone[: len(gone)]
        self._tell(Run([(self._numbers[s.storage], _tokens(s), s.num_sampled) for s in spans], gone))


def _tokens(span: Span) -> list[int]:
    assert not isinstance(span.tokens, mx.array), "no step is built from tokens that nobody has read"
    return [int(token) for token in span.tokens]


class Mirror:
    """Another rank's side of it: the same rows, opened when they are first told of."""

    def __init__(self, forward: Forward, *, mode: str, in_turn: bool) -> None:
        self._forward = forward
        self._mode = mode
        self._in_turn = in_turn
        self._rows: dict[int, RowStorage] = {}

    def begin(self, told: Begin) -> None:
        """Store keys and values as rank 0 does. Raises EngineStopped where it runs rows in another mode."""
        if told.mode != self._mode:
            raise EngineStopped(f"rank 0 runs rows in the mode {told.mode}, but {self._mode} was found here")
        self._forward.cache_dtype = dtype.BY_NAME[told.cache_dtype] if told.cache_dtype else None

    def run(self, told: Run) -> None:
        for number in told.gone:
            self._rows.pop(number, None)
        spans = []
        for number, tokens, num_sampled in told.spans:
            if number not in self._rows:
                self._rows[number] = self._forward.open()
            spans.append(Span(self._rows[number], tokens, num_sampled))
        run(self._forward, spans, in_turn=self._in_turn)
