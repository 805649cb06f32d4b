"""Who runs next: admission to the slots and the choice between prefill and decode.

`tick` returns a plain value and `settle` hears what came of it. No arrays and no clock; the engine is not known.

While rows decode there is at least one decode tick between two prefill ticks; where the plan mixes, a tick is
both.

A prompt in a slot has one piece in each window of N + 1 ticks, N being the `grant_interval`, counted from its
first tick. So one of C pieces has its first token within C * (N + 1) ticks, and puts no more than one piece into a
window while others decode. What is close to the end of its window goes first; before that first pieces do, so that
short prompts pass long ones. With (N + 1) / 2 slots or fewer the windows hold whatever comes. Where there is no
room for all, the one whose window ended first goes first: they take turns.

A free slot goes to the waiting row of the highest priority, among equals to the first. Whoever waits rises by one
priority every `RISE_TICKS`, so at the latest after twice that many a row is passed by none that came after it.
"""

from collections import deque
from collections.abc import Iterable

from engine.plan import Piece, PrefillPlan, Tick
from engine.request import PRIORITIES, Event, Failed, Output, Row

RISE_TICKS = 256


class Scheduler:
    """Three places for a row: `waiting` for a slot, `prefilling`, `decoding`. `slots` has the rows that run."""

    def __init__(self, plan: PrefillPlan, *, num_slots: int, max_batch_size: int = 0, grant_interval: int = 16):
        self.plan = plan
        self.slots: list[Row | None] = [None] * num_slots
        self._max_batch_size = max_batch_size or num_slots
        self._grant_interval = grant_interval
        self.waiting: dict[Row, int] = {}  # in the order of arrival, with the tick of it
        self.prefilling: list[Row] = []
        self.decoding: deque[Row] = deque()
        self._tick_count = 0
        self._due_at: dict[Row, int] = {}  # when the window of a prompt's next piece begins
        self._parked: set[Row] = set()  # those that had a piece and want another
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every live row, those that run first."""
        return (*self.decoding, *self.prefilling, *self.waiting)

    def add(self, row: Row) -> None:
        self.waiting[row] = self._tick_count

    def remove(self, row: Row) -> None:
        """Forget `row`, wherever it is; unknown rows are no error."""
        self.waiting.pop(row, None)
        for place in (self.prefilling, self.decoding):
            if row in place:
                place.remove(row)
        if row in self.slots:
            self.slots[self.slots.index(row)] = None
        self._unpark(row)

    def tick(self) -> Tick:
        """What the next forward does; an empty Tick when there is nothing to do."""
        while self.waiting and None in self.slots:
            row = min(self.waiting, key=self._lane)
            del self.waiting[row]
            self.slots[self.slots.index(None)] = row
            self.prefilling.append(row)
        self._tick_count += 1
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
        return Tick(prefill=pieces, decode=decode)

    def settle(self, events: Iterable[Event]) -> None:
        """Move rows on by what a tick did to them."""
        for event in events:
            match event:
                case Failed(row=row) | Output(row=row, finish_reason="stop" | "length"):
                    self.remove(row)
        for row in [row for row in self.prefilling if row.prefilled]:
            self.prefilling.remove(row)
            self._unpark(row)
            self.decoding.append(row)

    def check(self) -> None:
        """Every live row is in exactly one place and the slots are not overbooked."""
        rows = self.rows
        assert len(set(map(id, rows))) == len(rows), "a row is in two places"
        running = [row for row in self.slots if row is not None]
        assert len(running) == len(set(map(id, running))), "a row has two slots"
        assert {*running} == {*self.prefilling, *self.decoding}, "a row runs without a slot, or a slot has no row"
        assert self._parked <= set(self._due_at) <= set(self.prefilling), "a claim outlived its row"
        assert all(row.prefilled for row in self.decoding), "a row decodes before its prompt is stored"

    def _lane(self, row: Row) -> int:
        """How many priorities are above that of a waiting row by now."""
        risen = (self._tick_count - self.waiting[row]) // RISE_TICKS
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
            for row in self.prefilling
            if not (waits and row in self._parked and self._due_at[row] > self._tick_count)
        ]
        return [row for _, row in sorted(claims, key=lambda claim: claim[0])]

    def _claim(self, row: Row) -> tuple[int, int]:
        """What `row` is sorted by: close to the end of its window, then first pieces, then the shortest."""
        ends_at = self._due_at[row] + self._grant_interval + 1
        ticks_of_parked = 2 * len(self._parked)
        if row in self._parked:
            rest = len(row.request.prompt) - row.cursor
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
