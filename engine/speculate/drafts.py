"""Which rows bring draft tokens to a step, and how many: asked by the scheduler, told what came of it.

Decides and proposes; verifies nothing. In one step all rows together bring at most a block of draft tokens, and
who begins the hand-out changes with every round, so that a request that speculates delays the others by one
round at most and takes turns with its like. Plain values; no arrays, no clock.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from engine.plan import Draft, Tick
from engine.request import DraftCounts, Row
from engine.speculate.governor import Governor, Track
from engine.speculate.lookup import KINDS, LookupIndex, kind_of
from engine.speculate.policy import DraftPolicy, Pair, policy_of

log = logging.getLogger(__name__)

KEEP_ROUNDS = 500  # after so many what is known is kept for the next run
OLD_STEPS = 2000  # plain steps in a row after which what rounds cost is to be measured anew
# Tokens to the first look at what a draft model would propose for a row that is paused; to each further one twice
# as many as before, up to the most.
LOOK_TOKENS, MOST_LOOK_TOKENS = 16, 1024
LOOKED_AT = 4  # tokens that it is asked for then


class Drafts(Protocol):
    """What the scheduler asks and the loop tells."""

    def of(self, rows: Sequence[Row], *, num_running: int) -> tuple[Draft, ...]:
        """The draft tokens that some of `rows` bring to the step they take next; `num_running` rows have slots."""
        ...

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        """`tokens` are new in `row`, in a step of `num_rows` rows, to which it brought so many draft tokens."""
        ...

    def measured(self, tick: Tick, seconds: float) -> None:
        """A step without prompts took so long; what came of it is not settled yet."""
        ...

    def forget(self, row: Row) -> None:
        """The row has ended or given its place away; unknown rows are no error."""
        ...

    def stats(self) -> DraftCounts:
        """What has happened since the start."""
        ...

    def policy(self) -> DraftPolicy | None:
        """What is known of whether drafting pays here; None where nobody drafts."""
        ...

    def close(self) -> None:
        """Keep what is known for the next run."""
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

    def stats(self) -> DraftCounts:
        return DraftCounts()

    def policy(self) -> DraftPolicy | None:
        return None

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Known:
    """What is known of one row, by the kind of its proposals; `kind` is that of the last. `index` is there
    where its own text is looked up. `look_at` is the length of the answer from which a draft model is looked at
    again, which is `look_after` tokens behind the last look.
    """

    tracks: tuple[Track, ...]
    kind: int = 0
    index: LookupIndex | None = None
    look_at: int = 0
    look_after: int = 0


class _Rounds:
    """What both ways to draft have in common: turns, counts and the governor. `keep` is called with it at
    times.
    """

    kind: ClassVar[str]
    same: ClassVar[tuple[int, ...]] = (0,)  # the kinds of proposals, by how many tokens came before at least

    def __init__(
        self,
        governor: Governor,
        *,
        block_size: int,
        max_rows: int | None = None,
        pair: Pair | None = None,
        keep: Callable[[Governor], None] = lambda governor: None,
    ) -> None:
        self.governor = governor
        self.counts = DraftCounts(self.kind)
        self._block_size = block_size
        self._max_rows = max_rows
        self._pair = pair or Pair("", "", "")
        self._keep = keep
        self._rows: dict[Row, _Known] = {}
        self._told: set[Row] = set()  # rows of which the log says why they bring nothing
        self._first: Row | None = None  # who is asked first
        self._num_plain = 0  # steps since the last round

    def of(self, rows: Sequence[Row], *, num_running: int) -> tuple[Draft, ...]:
        if self._max_rows is not None and num_running > self._max_rows:
            return ()
        drafts: list[Draft] = []
        left, num_tokens = self._block_size, len(rows)
        at = rows.index(self._first) if self._first in rows else 0
        for row in (*rows[at:], *rows[:at]):
            draft = self._drafted(row, left, num_tokens) if left else None
            if draft is not None:
                drafts.append(draft)
                left -= draft.num_tokens
                num_tokens += draft.num_tokens if draft.verified else 0
        if drafts:
            self._first = rows[(rows.index(drafts[0].row) + 1) % len(rows)]
        return tuple(drafts)

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        known = self._rows.get(row)
        if known is None:
            return
        for track in known.tracks:
            self.governor.watched(track, tokens, num_rows)
        if not num_drafted:
            return
        self.counts.add(num_drafted, len(tokens) - 1)
        self.governor.verified(known.tracks[known.kind], num_drafted, len(tokens) - 1)
        if self.counts.rounds % KEEP_ROUNDS == 0:
            self.close()

    def measured(self, tick: Tick, seconds: float) -> None:
        num_drafted = sum(draft.row.num_drafted for draft in tick.drafts)
        if num_drafted:
            self.governor.rounds.measured(len(tick.decode) + num_drafted, seconds)
            self._num_plain = 0
        elif not tick.drafts:
            self.governor.plain.measured(len(tick.decode), seconds)
            self._num_plain += 1
            if self._num_plain == OLD_STEPS:
                self.governor.rounds.forget()

    def forget(self, row: Row) -> None:
        self._rows.pop(row, None)
        self._told.discard(row)

    def stats(self) -> DraftCounts:
        return replace(self.counts, pauses=self.governor.num_pauses)

    def policy(self) -> DraftPolicy | None:
        return policy_of(self._pair, self._block_size, self.governor, self.stats(), self.same)

    def close(self) -> None:
        self._keep(self.governor)

    def _drafted(self, row: Row, left: int, num_tokens: int) -> Draft | None:
        """What `row` brings beside its last token, of at most `left`, to a step that has `num_tokens` without."""
        reason = plain_reason(row)
        if reason is not None:
            if row not in self._told:
                self._told.add(row)
                log.debug("request %s takes one token a step: %s", row.request.id, reason)
            return None
        if row not in self._rows:
            self._rows[row] = _Known(tuple(map(Track, range(len(self.governor.guesses)))))
        # The last token that a row may have is never stored.
        most = min(left, row.limit_tokens - len(row.output) - 1)
        if most <= 0:
            return None
        known = self._rows[row]
        num_pauses = self.governor.num_pauses
        draft = self._proposed(row, known, most, num_tokens)
        row.drafts.pauses += self.governor.num_pauses - num_pauses
        return draft

    def _proposed(self, row: Row, known: _Known, most: int, num_tokens: int) -> Draft | None:
        raise NotImplementedError


class PromptLookup(_Rounds):
    """Draft tokens are what followed a row's last tokens when they came before, in its prompt or its answer."""

    kind = "prompt-lookup"
    same = tuple(num_same for num_same, _ in KINDS)

    def _proposed(self, row: Row, known: _Known, most: int, num_tokens: int) -> Draft | None:
        index = known.index = known.index or LookupIndex(row.request.prompt)
        index.extend(row.output[len(index.tokens) - len(row.request.prompt) :])
        proposal, num_same = index.proposal(most)
        if not proposal:
            return None
        known.kind = kind_of(num_same)
        track = known.tracks[known.kind]
        width = self.governor.width(track, len(proposal), num_tokens)
        if width:
            return Draft(row, width, proposal[:width])
        if not track.shadow:
            self.governor.watch(track, proposal)
        return None


class ModelDrafts(_Rounds):
    """Draft tokens are those of a smaller model, which the engine asks. While a row is paused, the model is looked
    at now and then, and what it would have said is held against what comes.
    """

    kind = "draft"

    def _proposed(self, row: Row, known: _Known, most: int, num_tokens: int) -> Draft | None:
        [track] = known.tracks
        width = self.governor.width(track, most, num_tokens)
        if width:
            known.look_after = known.look_at = 0
            return Draft(row, width)
        if not track.is_paused or track.shadow or not self.governor.could_pay(most, num_tokens):
            return None
        if (
            not known.look_after
        ):  # the model reads all that it has not read first, so a long prompt waits for longer
            known.look_after = max(LOOK_TOKENS, len(row.request.prompt) // 2)
        elif len(row.output) >= known.look_at:
            known.look_after = min(2 * known.look_after, MOST_LOOK_TOKENS)
        else:
            return None
        is_first = known.look_at == 0
        known.look_at = len(row.output) + known.look_after
        return None if is_first else Draft(row, min(most, LOOKED_AT), verified=False)

    def settled(self, row: Row, num_drafted: int, tokens: Sequence[int], num_rows: int) -> None:
        known = self._rows.get(row)
        if known is not None and row.looked_at:
            self.governor.watch(known.tracks[0], row.looked_at)
            row.looked_at = ()
        super().settled(row, num_drafted, tokens, num_rows)


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
