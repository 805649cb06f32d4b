"""Who runs next: admission to slots and memory, and the choice between prefill and decode.

`tick` returns a plain value and `settle` hears what came of it. No arrays and no clock; the engine is not known.

While rows decode there is at least one decode tick between two prefill ticks; where the plan mixes, a tick is
both.

A prompt in a slot has one piece in each window of N + 1 ticks, N being the `grant_interval`, counted from its
first tick. So one of C pieces has its first token within C * (N + 1) ticks, and puts no more than one piece into a
window while others decode. What is close to the end of its window goes first; before that first pieces do, so that
short prompts pass long ones. With (N + 1) / 2 slots or fewer the windows hold whatever comes. Where there is no
room for all, the one whose window ended first goes first: they take turns. A prompt that can begin where one that
has its slot for longer is about to come waits for that one.

A free slot goes to the waiting row of the highest priority, among equals to the first. Whoever waits rises by one
priority every `RISE_TICKS`, so at the latest after twice that many a row is passed by none that came after it. Who
is first and does not fit into memory is passed by nobody, so that large requests are not starved by small ones.

A row that cannot grow takes the place of the one that has come least far. A preempted row waits with the age that
it has, and a row that runs keeps the priority that it had risen to, so that nobody is preempted for ever.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.cache.ledger import Memory, Unbounded
from engine.plan import Draft, Piece, PrefillPlan, Tick
from engine.request import PRIORITIES, Embedded, Event, Failed, Handed, Output, Row
from engine.speculate.drafts import Drafts, NoDrafts

RISE_TICKS = 256


@dataclass(slots=True)
class _Standing:
    """When a row arrived, by tick and by number, and the priority that it has risen to: 0 is the highest."""

    tick: int
    number: int
    lane: int


class Scheduler:
    """Four places for a row: `waiting` for a slot, `prefilling`, `decoding`, and `leaving`: it goes on elsewhere,
    and has its slot and memory until it is removed. `slots` has the rows of all but the first.

    `memory` says whether a row may start and grow, `drafts` what rows bring to a step beside their last tokens, as
    far as there is memory for it. `preempts`: a row of higher priority may take the place of one
    that runs; where nothing else helps a row to grow, one is preempted whatever this says.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        *,
        num_slots: int,
        max_batch_size: int = 0,
        grant_interval: int = 16,
        memory: Memory | None = None,
        drafts: Drafts | None = None,
        preempts: bool = False,
    ) -> None:
        self.plan = plan
        self.drafts = drafts or NoDrafts()
        self.slots: list[Row | None] = [None] * num_slots
        self.memory = memory or Unbounded()
        self._max_batch_size = max_batch_size or num_slots
        self._grant_interval = grant_interval
        self._preempts = preempts
        self.waiting: list[Row] = []
        self.prefilling: list[Row] = []
        self.decoding: deque[Row] = deque()
        self.leaving: list[Row] = []
        self._standing: dict[Row, _Standing] = {}
        self._num_added = 0
        self._tick_count = 0
        self._due_at: dict[Row, int] = {}  # when the window of a prompt's next piece begins
        self._parked: set[Row] = set()  # those that had a piece and want another
        self._last_was_prefill = False
        self._is_held_up = False  # the last tick had nothing to do, and nobody has come or gone since

    @property
    def has_work(self) -> bool:
        """Whether a tick may do something. Who waits for those that leave has to wait until they are removed."""
        return bool(self.prefilling or self.decoding or (self.waiting and not self._is_held_up))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every live row, those that run first."""
        return (*self.decoding, *self.prefilling, *self.leaving, *self.waiting)

    def add(self, row: Row) -> None:
        self._is_held_up = False
        self._num_added += 1
        lane = PRIORITIES.index(row.request.priority)
        self._standing[row] = _Standing(self._tick_count, self._num_added, lane)
        self.waiting.append(row)

    def remove(self, row: Row) -> None:
        """Forget `row`, wherever it is; unknown rows are no error."""
        self._is_held_up = False
        if row in self.waiting:
            self.waiting.remove(row)
        self._leave(row)
        self._standing.pop(row, None)

    def tick(self) -> Tick:
        """What the next forward does; an empty Tick when there is nothing to do."""
        # Whoever runs grows first: what was freed for that is not for those who wait.
        preempted = self._make_grow(self.decoding) or self._fill_slots()
        self._tick_count += 1
        if preempted is not None:
            return Tick(preempt=(preempted,))
        granted = self._granted()
        decode: tuple[Row, ...] = ()
        if self.plan.mixes or not granted:
            decode = tuple(self.decoding)[: self._max_batch_size]
            if len(decode) < len(self.decoding):
                self.decoding.rotate(-len(decode))
        pieces: tuple[Piece, ...] = ()
        if granted:
            pieces = self.plan.pieces(granted, decoding=bool(self.decoding), beside=len(decode))
            for piece in pieces:
                self._park(piece.row)
        self._last_was_prefill = bool(pieces) and not decode
        self._is_held_up = bool(self.leaving) and not (pieces or decode)
        return Tick(prefill=pieces, decode=decode, drafts=() if pieces else self._drafted(decode))

    def settle(self, events: Sequence[Event]) -> None:
        """Move rows on by what a tick did to them."""
        self._settle_drafts(events)
        for event in events:
            match event:
                case Failed(row=row) | Embedded(row=row) | Output(row=row, finish_reason="stop" | "length"):
                    self.remove(row)
                case Handed(row=row):
                    self._take_leave(row)
        for row in [row for row in self.prefilling if row.prefilled]:
            self.prefilling.remove(row)
            self._unpark(row)
            self.decoding.append(row)

    def _drafted(self, decode: Sequence[Row]) -> tuple[Draft, ...]:
        """What the rows of this step bring beside their last tokens. No row gives anything up for it."""
        drafts = []
        for draft in self.drafts.of(decode, num_running=len(self._running())) if decode else ():
            draft.row.num_drafted = draft.num_tokens if draft.verified else 0
            if self.memory.grows(draft.row):
                drafts.append(draft)
            else:
                draft.row.num_drafted = 0
        return tuple(drafts)

    def _settle_drafts(self, events: Iterable[Event]) -> None:
        """Tell what came of the rows that decoded, drafts or none."""
        tokens: dict[Row, list[int]] = {}
        for event in events:
            if isinstance(event, Output):
                tokens.setdefault(event.row, []).append(event.token)
        for row, new in tokens.items():
            self.drafts.settled(row, row.num_drafted, new, len(tokens))
        for row in self.decoding:
            row.num_drafted = 0

    def check(self) -> None:
        """Every live row is in exactly one place and the slots are not overbooked."""
        rows = self.rows
        assert len(set(map(id, rows))) == len(rows), "a row is in two places"
        running = [row for row in self.slots if row is not None]
        assert len(running) == len(set(map(id, running))), "a row has two slots"
        placed = {*self.prefilling, *self.decoding, *self.leaving}
        assert {*running} == placed, "a row runs without a slot, or a slot has no row"
        assert self._parked <= set(self._due_at) <= set(self.prefilling), "a claim outlived its row"
        assert all(row.prefilled for row in self.decoding), "a row decodes before its prompt is stored"
        assert {*self._standing} == {*rows}, "a row has no standing, or outlived itself"
        self.memory.check()

    def _fill_slots(self) -> Row | None:
        """Let waiting rows run in their order, as far as slots and memory allow; the row preempted for that.

        One at a time: what it has is free when the engine has taken it.
        """
        while self.waiting:
            for row in self.waiting:
                self._standing[row].lane = self._lane(row)
            row = min(self.waiting, key=lambda row: (self._standing[row].lane, self._standing[row].number))
            if not self._starts(row):
                weaker = self._weaker(row)
                if weaker is not None:
                    self._preempt(weaker)
                return weaker
        return None

    def _starts(self, row: Row) -> bool:
        """Give `row` a slot, if there is one and its memory can be had."""
        if None not in self.slots or not self.memory.admits(row, decoding=bool(self.decoding)):
            return False
        self.waiting.remove(row)
        self.slots[self.slots.index(None)] = row
        self.prefilling.append(row)
        return True

    def _make_grow(self, rows: Iterable[Row]) -> Row | None:
        """See to it that `rows` have room for their next token; the row preempted for that, one at a time.

        A row that runs alone and cannot grow has room for this one step, and ends with it.
        """
        for row in rows:
            if self.memory.grows(row):
                continue
            running = self._running()
            if running == [row] and not self.leaving:
                row.limit_tokens = len(row.output) + 1
                continue
            least = min(running, key=self._progress)
            self._preempt(least)
            return least
        return None

    def _take_leave(self, row: Row) -> None:
        """Run `row` no more; it keeps what it has."""
        for place in (self.prefilling, self.decoding):
            if row in place:
                place.remove(row)
        self._unpark(row)
        self.drafts.forget(row)
        self.leaving.append(row)

    def _preempt(self, row: Row) -> None:
        """Back to those who wait; the engine gives its storage back when it gets the tick."""
        self._leave(row)
        self.waiting.append(row)

    def _leave(self, row: Row) -> None:
        """Take slot and memory from `row`, if it has them."""
        for place in (self.prefilling, self.decoding, self.leaving):
            if row in place:
                place.remove(row)
        if row in self.slots:
            self.slots[self.slots.index(row)] = None
        self._unpark(row)
        self.drafts.forget(row)
        self.memory.frees(row)

    def _running(self) -> list[Row]:
        return [*self.prefilling, *self.decoding]

    def _weaker(self, row: Row) -> Row | None:
        """The row to be preempted for a waiting one: the lowest of those whose priority is strictly below, among
        equals the one that has come least far. What `row` has risen to by waiting counts only for itself running.
        """
        if not self._preempts:
            return None
        lane = PRIORITIES.index(row.request.priority)
        weaker = [other for other in self._running() if self._standing[other].lane > lane]
        return min(weaker, key=lambda other: (-self._standing[other].lane, self._progress(other)), default=None)

    def _progress(self, row: Row) -> tuple[int, int]:
        """What makes a row worth keeping: its answer's length, among equals its age."""
        return len(row.output), -self._standing[row].number

    def _lane(self, row: Row) -> int:
        """How many priorities are above that of a waiting row by now."""
        risen = (self._tick_count - self._standing[row].tick) // RISE_TICKS
        return max(PRIORITIES.index(row.request.priority) - risen, 0)

    def _granted(self) -> list[Row]:
        """Rows that may prefill in this tick, in the order of their claims."""
        for row in self.prefilling:
            self._due_at.setdefault(row, self._tick_count)
        waits = bool(self.decoding) and not self.plan.mixes
        if waits and self._last_was_prefill:
            return []
        claims = [
            (self._claim(row), row)
            for place, row in enumerate(self.prefilling)
            if not (waits and row in self._parked and self._due_at[row] > self._tick_count)
            and not self.plan.waits(row, self.prefilling[:place])
        ]
        return [row for _, row in sorted(claims, key=lambda claim: claim[0])]

    def _claim(self, row: Row) -> tuple[int, int]:
        """What `row` is sorted by: close to the end of its window, then first pieces, then the shortest."""
        ends_at = self._due_at[row] + self._grant_interval + 1
        ticks_of_parked = 2 * len(self._parked)
        if row in self._parked:
            rest = len(row.prefill_tokens) - row.cursor
            return (0, ends_at) if ends_at - self._tick_count <= ticks_of_parked else (2, rest)
        is_crowded = ticks_of_parked + 2 > self._grant_interval + 1
        return (0, ends_at) if is_crowded and ends_at <= self._tick_count else (1, 0)

    def _park(self, row: Row) -> None:
        """Note that `row` has this tick's piece; a window that was missed altogether is lost."""
        window = self._grant_interval + 1
        if self._due_at[row] <= self._tick_count:
            self._due_at[row] = max(self._due_at[row] + window, self._tick_count + 1)
        self._parked.add(row)

    def _unpark(self, row: Row) -> None:
        self._due_at.pop(row, None)
        self._parked.discard(row)
