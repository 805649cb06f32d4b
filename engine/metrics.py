"""What the engine counts: numbers, without names for the wire and without a format.

The loop's thread counts, any thread reads a copy. Times are seconds of the loop's clock, which is given. Knows no
arrays, no scheduler and no HTTP.
"""

import bisect
import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.plan import Tick
from engine.request import CacheStats, DraftCounts, Embedded, Event, Output, Progress

Outcome = Literal["stop", "length", "cancelled", "failed", "refused", "handed_over"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

WAITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Observations, counted by the first of `bounds` that is not below them; the last count is beyond them all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_observed(self) -> int:
        return sum(self.counts)


def _waits() -> Histogram:
    return Histogram(WAITS_S)


@dataclass(slots=True)
class Numbers:
    """Counts since the start, and what stands now. A request here is one sequence: a choice of `n`, a prompt."""

    at_s: float = 0.0  # when this was read
    requests: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    prompt_tokens: int = 0  # stored by prefill pieces of rows that run for the first time
    recomputed_tokens: int = 0  # stored by those of rows that were preempted
    prompt_s: float = 0.0  # from a row's start to its first token, or its vector
    completion_tokens: int = 0
    decode_steps: int = 0
    lookahead_steps: int = 0
    prefill_pieces: int = 0
    prefill_grants: int = 0
    mixed_steps: int = 0  # forwards that are decode steps and prefill grants at once
    rows_run: int = 0  # rows of all forwards together
    preemptions: int = 0
    longest_tokens: int = 0  # prompt and answer of the longest row that ended
    queue_depth: int = 0
    active_rows: int = 0
    kv_bytes: int = 0
    kv_blocks: dict[str, int] = field(default_factory=dict)  # by their state, where rows are paged
    launches: dict[str, int] = field(default_factory=dict)  # forwards by the way they went
    prompt_cache: CacheStats = CacheStats()  # tokens reused are not among `prompt_tokens`
    drafts: DraftCounts = field(default_factory=DraftCounts)
    ttft_s: Histogram = field(default_factory=_waits)
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(GAPS_S))
    queue_wait_s: Histogram = field(default_factory=_waits)
    e2e_s: Histogram = field(default_factory=_waits)

    @property
    def forwards(self) -> int:
        return self.decode_steps + self.prefill_grants - self.mixed_steps


@dataclass(slots=True)
class Times:
    """When one request was submitted, first ran, and last gave a token."""

    submitted_s: float
    started_s: float | None = None
    token_s: float | None = None


class Metrics:
    """Counts for one loop. Its thread calls what counts; `refused` and `read` may be called from any."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._lock = threading.Lock()

    def read(self) -> Numbers:
        """A copy of the numbers, all of one moment."""
        with self._lock:
            return copy.deepcopy(self._numbers)

    def refused(self) -> None:
        """A request found no place."""
        with self._lock:
            self._numbers.requests["refused"] += 1

    def started(self, waiting: Iterable[Times], now_s: float) -> None:
        """These requests are about to run for the first time."""
        with self._lock:
            for times in waiting:
                times.started_s = now_s
                self._numbers.queue_wait_s.observe(now_s - times.submitted_s)

    def ran(self, tick: Tick, happened: Iterable[tuple[Times, Event]], now_s: float) -> None:
        """A tick was run, and this came of it and of the one before."""
        with self._lock:
            numbers = self._numbers
            numbers.decode_steps += bool(tick.decode)
            numbers.prefill_grants += bool(tick.prefill)
            numbers.mixed_steps += bool(tick.decode and tick.prefill)
            numbers.prefill_pieces += len(tick.prefill)
            numbers.rows_run += len(tick.rows)
            numbers.preemptions += len(tick.preempt)
            stored = {piece.row: piece.num_tokens for piece in tick.prefill}
            for times, event in happened:
                match event:
                    case Progress(row=row) if row.num_preempted:
                        numbers.recomputed_tokens += stored.get(row, 0)
                    case Progress(row=row):
                        numbers.prompt_tokens += stored.get(row, 0)
                    case Embedded(row=row):
                        assert times.started_s is not None, "a row gave a vector before it ran"
                        numbers.prompt_s += now_s - times.started_s
                        numbers.longest_tokens = max(numbers.longest_tokens, len(row.request.prompt))
                    case Output(row=row):
                        self._token(times, now_s)
                        numbers.longest_tokens = max(
                            numbers.longest_tokens, len(row.request.prompt) + len(row.output)
                        )

    def stands(
        self,
        *,
        kv_bytes: int,
        kv_blocks: dict[str, int],
        launches: dict[str, int],
        lookahead_steps: int,
        prompt_cache: CacheStats,
        drafts: DraftCounts,
    ) -> None:
        """What the engine keeps and has counted itself."""
        with self._lock:
            self._numbers.kv_bytes = kv_bytes
            self._numbers.kv_blocks = kv_blocks
            self._numbers.launches = launches
            self._numbers.lookahead_steps = lookahead_steps
            self._numbers.prompt_cache = prompt_cache
            self._numbers.drafts = drafts

    def ended(self, outcome: Outcome, times: Times, now_s: float) -> None:
        """A request is over."""
        with self._lock:
            self._numbers.requests[outcome] += 1
            self._numbers.e2e_s.observe(now_s - times.submitted_s)

    def _token(self, times: Times, now_s: float) -> None:
        numbers = self._numbers
        numbers.completion_tokens += 1
        if times.token_s is None:
            numbers.ttft_s.observe(now_s - times.submitted_s)
            assert times.started_s is not None, "a row gave a token before it ran"
            numbers.prompt_s += now_s - times.started_s
        else:
            numbers.inter_token_s.observe(now_s - times.token_s)
        times.token_s = now_s
