"""The forward that all ranks run: rank 0 tells the others its spans, then each runs them on its own part.

Every rank evaluates the same graph, and nothing else, in each of them, so that what MLX sends between them comes
in one order everywhere. Which mode rows run in, draws, grammars and text are rank 0's alone to decide.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.cache import dtype
from engine.cache.adapter import HeadSelection, select_before_head
from engine.cache.pages import Pages
from engine.cache.rows import RowStorage
from engine.forward import Forward, Span
from engine.probe import MODES, Make, Verdict, probe
from engine.ranks.messages import Begin, Run

Tell = Callable[[Begin | Run], None]
IN_TURN = "the ranks of a pipeline run one row after the other"


def run(forward: Forward, spans: Sequence[Span], *, in_turn: bool) -> mx.array:
    """Logits `[S, vocab]` of the spans, evaluated; with `in_turn` one span after the other."""
    parts = [[span] for span in spans] if in_turn else [spans]
    logits = []
    for part in parts:
        logits.append(forward.run(part))
        mx.eval(logits[-1], [span.storage.arrays() for span in part])
    return mx.concatenate(logits) if len(logits) > 1 else logits[0]


class ToldForward:
    """Rank 0's forward in `mode`. `tell` sends a message to every other rank. `fail` is called with what makes
    going on impossible, None while modes are tried: once the others were told, they have to be joined.

    Rows are known to the others by numbers; that a row has ended travels with the next forward.
    """

    pages: Pages | None = None

    def __init__(
        self,
        forward: Forward,
        *,
        mode: str,
        in_turn: bool,
        tell: Tell,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        self.forward = forward
        self._mode = mode
        self._in_turn = in_turn
        self._tell = tell
        self._fail = fail
        self._begun = False
        self._numbers: weakref.WeakKeyDictionary[RowStorage, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._gone: list[int] = []
        self.name, self.on_grid, self.cuts = forward.name, forward.on_grid, forward.cuts
        self.batches = forward.batches
        self.stores, self.by_handles = forward.stores, forward.by_handles
        self.kinds, self.launches, self.choice = forward.kinds, forward.launches, forward.choice

    @property
    def cache_dtype(self) -> mx.Dtype | None:
        return self.forward.cache_dtype

    @cache_dtype.setter
    def cache_dtype(self, kept_as: mx.Dtype | None) -> None:
        assert not self._begun, "the others know already how rows are stored"
        self.forward.cache_dtype = kept_as

    def open(self) -> RowStorage:
        return self._numbered(self.forward.open())

    def open_dense(self) -> RowStorage:
        return self._numbered(self.forward.open_dense())

    def run(self, spans: Sequence[Span]) -> mx.array:
        """As `Forward.run`, on every rank, evaluated."""
        try:
            self._tell_of(spans)
            return run(self.forward, spans, in_turn=self._in_turn)
        except Exception as fault:
            if self._fail is not None:
                self._fail(fault)
            raise

    def changed(self) -> None:
        """No adapter is mounted beside a model over several ranks."""

    def _numbered(self, storage: RowStorage) -> RowStorage:
        number = next(self._next_number)
        self._numbers[storage] = number
        weakref.finalize(storage, self._gone.append, number).atexit = False
        return storage

    def _tell_of(self, spans: Sequence[Span]) -> None:
        if not self._begun:
            self._begun = True
            kept_as = "" if self.cache_dtype is None else dtype.name_of(self.cache_dtype)
            self._tell(Begin(self._mode, kept_as, tries=self._fail is None))
        gone = list(self._gone)
        del self._gone[: len(gone)]
        self._tell(Run([(self._numbers[s.storage], _tokens(s), s.num_sampled) for s in spans], gone))


def _tokens(span: Span) -> list[int]:
    assert not isinstance(span.tokens, mx.array), "no step is built from tokens that nobody has read"
    return [int(token) for token in span.tokens]


def chosen(
    model: Any, vocab_size: int, *, in_turn: bool, tell: Tell, fail: Callable[[Exception], None]
) -> tuple[ToldForward, Verdict]:
    """Rank 0's forward of a split model: one that a probe chooses, which the other ranks run too."""

    def told(mode: str) -> Make:
        return lambda model, selection: ToldForward(
            MODES[mode](model, selection), mode=mode, in_turn=in_turn, tell=tell
        )

    if in_turn:
        selection = select_before_head(model, vocab_size)
        forward, verdict = MODES["alone"](model, selection), Verdict("alone", IN_TURN, 0.0)
    else:
        found, verdict = probe(model, vocab_size, {mode: told(mode) for mode in MODES})
        assert isinstance(found, ToldForward)
        forward = found.forward
    return ToldForward(forward, mode=verdict.mode, in_turn=in_turn, tell=tell, fail=fail), verdict


class Mirror:
    """Another rank's side of it: the same forwards over the same rows, opened when they are first told of."""

    def __init__(self, model: Any, vocab_size: int, *, in_turn: bool) -> None:
        self._model = model
        self._selection: HeadSelection = select_before_head(model, vocab_size)
        self._in_turn = in_turn
        self._forward: Forward | None = None
        self._tries = False
        self._rows: dict[int, RowStorage] = {}

    def begin(self, told: Begin) -> None:
        self._rows.clear()
        self._tries = told.tries
        self._forward = MODES[told.mode](self._model, self._selection)
        self._forward.cache_dtype = dtype.BY_NAME[told.cache_dtype] if told.cache_dtype else None

    def run(self, told: Run) -> None:
        assert self._forward is not None, "rank 0 says how before it says what"
        for number in told.gone:
            self._rows.pop(number, None)
        spans = []
        for number, tokens, num_sampled in told.spans:
            if number not in self._rows:
                self._rows[number] = self._forward.open()
            spans.append(Span(self._rows[number], tokens, num_sampled))
        try:
            run(self._forward, spans, in_turn=self._in_turn)
        except Exception:
            # A mode that does not fit the model's code fails alike on every rank, before anything is sent.
            if not self._tries:
                raise

    @property
    def num_rows(self) -> int:
        """How many rows are kept."""
        return len(self._rows)
