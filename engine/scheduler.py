"""Who runs next: admission to the slots and the choice between prefill and decode.

`tick` returns a plain value and `settle` hears what came of it. No arrays and no clock; the engine is not known.

Between two prefill ticks there is at least one decode tick while rows decode. A prompt's first piece is granted
at once; each later one after `grant_interval` ticks without one, so a prompt of C pieces has its first token
within C * (grant_interval + 1) ticks, and short prompts pass a long one between its pieces.

A free slot goes to the waiting row of the highest priority, among equals to the first. Whoever waits rises by one
priority every `RISE_TICKS`, so at the latest after twice that many a row is passed by none that came after it.
"""

from collections import deque
from collections.abc import Iterable

from engine.plan import PrefillPlan, Tick
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
        self._granted_at: dict[Row, int] = {}
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
        self._granted_at.pop(row, None)

    def tick(self) -> Tick:
        """What the next forward does; an empty Tick when there is nothing to do."""
        while self.waiting and None in self.slots:
            row = min(self.waiting, key=self._lane)
            del self.waiting[row]
            self.slots[self.slots.index(None)] = row
            self.prefilling.append(row)
        self._tick_count += 1
        granted = self._granted()
        if granted:
            pieces = self.plan.pieces(granted, decoding=bool(self.decoding))
            self._granted_at.update((piece.row, self._tick_count) for piece in pieces)
            self._last_was_prefill = True
            return Tick(prefill=pieces)
        self._last_was_prefill = False
        rows = tuple(self.decoding)[: self._max_batch_size]
        if len(rows) < len(self.decoding):
            self.decoding.rotate(-len(rows))
        return Tick(decode=rows)

    def settle(self, events: Iterable[Event]) -> None:
        """Move rows on by what a tick did to them."""
        for event in events:
            match event:
                case Failed(row=row) | Output(row=row, finish_reason="stop" | "length"):
                    self.remove(row)
        for row in [row for row in self.prefilling if row.prefilled]:
            self.prefilling.remove(row)
            self._granted_at.pop(row, None)
            self.decoding.append(row)

    def check(self) -> None:
        """Every live row is in exactly one place and the slots are not overbooked."""
        rows = self.rows
        assert len(set(map(id, rows))) == len(rows), "a row is in two places"
        running = [row for row in self.slots if row is not None]
        assert len(running) == len(set(map(id, running))), "a row has two slots"
        assert {*running} == {*self.prefilling, *self.decoding}, "a row runs without a slot, or a slot has no row"
        assert set(self._granted_at) <= set(rows), "a grant outlived its row"
        assert all(row.prefilled for row in self.decoding), "a row decodes before its prompt is stored"

    def _lane(self, row: Row) -> int:
        """How many priorities are above that of a waiting row by now."""
        risen = (self._tick_count - self.waiting[row]) // RISE_TICKS
        return max(PRIORITIES.index(row.request.priority) - risen, 0)

    def _granted(self) -> list[Row]:
        """Rows that may prefill in this tick, in the order of their claims."""
        if self.decoding and self._last_was_prefill:
            return []
        fresh = [row for row in self.prefilling if row not in self._granted_at]
        parked = [row for row in self.prefilling if row in self._granted_at]
        overdue = [row for row in parked if self._tick_count - self._granted_at[row] > self._grant_interval]
        if self.decoding:
            return overdue + fresh
        return overdue + fresh + [row for row in parked if row not in overdue]
