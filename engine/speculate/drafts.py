"""Which rows bring draft tokens to a step, and how many: asked by the scheduler, told what came of it.

Decides and proposes; verifies nothing. In one step all rows together bring at most a block of draft tokens, and
who begins the hand-out changes with every round, so that a request that speculates delays the others by one
round at most and takes turns with its like. Plain values; no arrays, no clock.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.plan import Draft, Tick
from engine.request import DraftCounts, Row
from engine.speculate.governor import Governor, RowGovernor
from engine.speculate.lookup import LookupIndex

log = logging.getLogger(__name__)


class Drafts(Protocol):
    """What the scheduler asks and the loop tells."""

    def of(self, rows: Sequence[Row], *, num_running: int) -> tuple[Draft, ...]:
        """The draft tokens that some of `rows` bring to the step they take next; `num_running` rows have slots."""
        ...

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        """`tokens` are new in `row`, in a step of `num_rows` rows, to which it brought so many draft tokens."""
        ...

    def measured(self, tick: Tick, seconds: float) -> None:
        """A step without prompts took so long."""
        ...

    def forget(self, row: Row) -> None:
        """The row has ended or given its place away; unknown rows are no error."""
        ...


class NoDrafts:
    """Every row brings one token."""

    def of(self, rows: Sequence[Row], *, num_running: int) -> tuple[Draft, ...]:
        return ()

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        pass

    def measured(self, tick: Tick, seconds: float) -> None:
        pass

    def forget(self, row: Row) -> None:
        pass


@dataclass(slots=True)
class _Drafted:
    """What is known of one row."""

    index: LookupIndex
    governor: RowGovernor = field(default_factory=RowGovernor)


class PromptLookup:
    """Draft tokens are what followed a row's last tokens when they came before, in its prompt or its answer.

    Up to `block_size` of them are verified in a step, while at most `max_rows` rows run.
    """

    def __init__(self, governor: Governor, *, block_size: int, max_rows: int) -> None:
        self.governor = governor
        self.counts = DraftCounts()
        self._block_size = block_size
        self._max_rows = max_rows
        self._rows: dict[Row, _Drafted] = {}
        self._told: set[Row] = set()  # rows of which the log says why they bring nothing
        self._first: Row | None = None  # who is asked first

    def of(self, rows: Sequence[Row], *, num_running: int) -> tuple[Draft, ...]:
        if num_running > self._max_rows:
            return ()
        drafts: list[Draft] = []
        left = self._block_size
        num_tokens = len(rows)
        for row in self._in_turn(rows):
            tokens = self._granted(row, left, num_tokens)
            if tokens:
                drafts.append(Draft(row, len(tokens), tokens))
                left -= len(tokens)
                num_tokens += len(tokens)
        if drafts:
            at = rows.index(drafts[0].row)
            self._first = rows[(at + 1) % len(rows)]
        return tuple(drafts)

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        known = self._rows.get(row)
        if known is None or not tokens:
            return
        if num_drafted:
            self.counts.add(num_drafted, len(tokens) - 1)
            self.governor.verified(known.governor, num_drafted, len(tokens) - 1)
        else:
            self.governor.watched(known.governor, tokens, num_rows)

    def measured(self, tick: Tick, seconds: float) -> None:
        self.governor.plain.measured(tick.decode_tokens, seconds)

    def forget(self, row: Row) -> None:
        self._rows.pop(row, None)
        self._told.discard(row)

    def _in_turn(self, rows: Sequence[Row]) -> list[Row]:
        at = rows.index(self._first) if self._first in rows else 0
        return [*rows[at:], *rows[:at]]

    def _granted(self, row: Row, left: int, num_tokens: int) -> tuple[int, ...]:
        """What `row` brings beside its last token, of at most `left`, to a step that has `num_tokens` without."""
        reason = plain_reason(row)
        if reason is not None:
            if row not in self._told:
                self._told.add(row)
                log.debug("request %s takes one token a step: %s", row.request.id, reason)
            return ()
        known = self._rows.get(row)
        if known is None:
            known = self._rows[row] = _Drafted(LookupIndex(row.request.prompt))
        index = known.index
        index.extend(row.output[len(index.tokens) - len(row.request.prompt) :])
        # The last token that a row may have is never stored.
        most = min(left, row.limit_tokens - len(row.output) - 1)
        if most <= 0 or known.governor.shadow:
            return ()
        proposal = index.proposal(most)
        width = self.governor.width(known.governor, len(proposal), num_tokens)
        if not width and proposal:
            self.governor.watch(known.governor, proposal)
        return proposal[:width]


def plain_reason(row: Row) -> str | None:
    """Why `row` brings one token and no more now, or None: it may bring several."""
    request = row.request
    if row.forced:
        return "its next tokens are forced"
    if request.grammar is not None:
        return "it is held to a grammar"
    if request.sampling.mirostat:
        return "mirostat steers by every token"
    return None
