"""When several tokens a step pay: what rounds are expected to give, against what they were measured to cost.

Numbers alone; who measures and who drafts is not known here. docs/speculation.md has the rules in words.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MEMORY = 0.85  # of older rounds' weight in a row's evidence, each round
OVERALL_MEMORY = 0.98  # the same in that of all rows
PRIOR_WEIGHT = 2.0  # draft tokens that the first guess counts as
FIRST_GUESS = 0.5  # share of draft tokens that are accepted, before anything is known
NUM_TIMES, NUM_SKIPPED = 15, 3  # durations kept of a width; its first ones record the step
PRIOR_COST = 0.3  # of a plain step, for each further token, before that is measured
MARGIN = 1.03  # what is to be gained before it is tried
NUM_CONFIRMATIONS = 2


class Costs:
    """Seconds of a decode forward by how many tokens are in it: medians of the last ones.

    `known` are those of an earlier run, which hold until there are new ones. While nothing is known, `like` is
    asked.
    """

    def __init__(self, known: Mapping[int, float] | None = None, like: "Costs | None" = None) -> None:
        self._seconds = dict(known or {})
        self._like = like
        self._times: dict[int, deque[float]] = {}
        self._num_seen: Counter[int] = Counter()

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A forward of so many tokens took so long."""
        self._num_seen[num_tokens] += 1
        if self._num_seen[num_tokens] > NUM_SKIPPED:
            times = self._times.setdefault(num_tokens, deque(maxlen=NUM_TIMES))
            times.append(seconds)
            self._seconds[num_tokens] = statistics.median(times)

    def forget(self) -> None:
        """What was measured is old: the machine may be another one by now."""
        self._seconds.clear()
        self._times.clear()

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._seconds)

    def table(self) -> dict[int, float]:
        """What is known, by the number of tokens."""
        return dict(sorted(self._seconds.items()))

    def of(self, num_tokens: int) -> float:
        """Seconds of a forward of so many tokens; where that is not known, drawn from the widths beside it."""
        if num_tokens in self._seconds:
            return self._seconds[num_tokens]
        if not self._seconds:
            return self._like.of(num_tokens) if self._like else _prior(num_tokens)
        below = max((count for count in self._seconds if count < num_tokens), default=None)
        above = min((count for count in self._seconds if count > num_tokens), default=None)
        if below is not None and above is not None:
            share = (num_tokens - below) / (above - below)
            return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])
        nearest = below or above
        assert nearest is not None, "one side of it is known"
        return self._seconds[nearest] * _prior(num_tokens) / _prior(nearest)


def _prior(num_tokens: int) -> float:
    """What a step of so many tokens costs in plain steps of one, before anything is measured."""
    return 1 + PRIOR_COST * (num_tokens - 1)


@dataclass(slots=True)
class Evidence:
    """How many draft tokens were accepted and how many were the first to be wrong, older rounds counting less."""

    accepted: float = 0.0
    wrong: float = 0.0

    def add(self, num_drafted: int, num_accepted: int, memory: float = MEMORY) -> None:
        self.accepted = self.accepted * memory + num_accepted
        self.wrong = self.wrong * memory + (num_accepted < num_drafted)

    def share(self, prior: float) -> float:
        """The share of draft tokens that are accepted, where those before them are."""
        weight = self.accepted + self.wrong + PRIOR_WEIGHT
        return (self.accepted + prior * PRIOR_WEIGHT) / weight


@dataclass(slots=True)
class Track:
    """One row's evidence of one `kind` of proposals. While it `is_paused` none of them is verified, but what would
    have been is watched: `shadow` is a proposal whose tokens are compared with those that come, `confirmed` how
    many in a row would have paid.
    """

    kind: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    is_paused: bool = False
    confirmed: int = 0
    shadow: tuple[int, ...] = ()
    shadow_accepted: int = 0


class Governor:
    """Decides for every row and step how many draft tokens to verify.

    `plain` are the costs of steps without draft tokens, `rounds` those with. `overall` is the evidence of all
    rows by the kind of proposals, which a new row begins with, and `guesses` are the shares by kind before
    there is any.
    """

    def __init__(
        self,
        plain: Costs,
        rounds: Costs,
        overall: Mapping[int, Evidence] | None = None,
        *,
        guesses: Sequence[float] = (FIRST_GUESS,),
        draft_cost: float = 0.0,
    ) -> None:
        self.plain = plain
        self.rounds = rounds
        self.draft_cost = draft_cost
        self.guesses = guesses
        self.overall = {kind: Evidence() for kind in range(len(guesses))} | dict(overall or {})
        self.num_pauses = 0

    def expected(self, share: float, num_drafted: int) -> float:
        """Tokens that a round of so many draft tokens gives, where `share` of them are accepted."""
        return sum(share**i for i in range(num_drafted + 1))

    def break_even(self, num_drafted: int, num_tokens: int = 1) -> float:
        """How many tokens such a round has to give to be worth its time, in a step of `num_tokens` without it."""
        return 1 + num_tokens * (self._round_s(num_drafted, num_tokens) / self.plain.of(num_tokens) - 1)

    def could_pay(self, num_drafted: int, num_tokens: int) -> bool:
        """Whether rounds of up to so many draft tokens would pay, were all of them accepted."""
        return any(width + 1 > self.break_even(width, num_tokens) for width in range(1, num_drafted + 1))

    def share(self, track: Track) -> float:
        """The share of its draft tokens that are accepted."""
        return track.evidence.share(self.overall_share(track.kind))

    def overall_share(self, kind: int) -> float:
        """The same over all rows."""
        return self.overall[kind].share(self.guesses[kind])

    def width(self, track: Track, num_drafted: int, num_tokens: int) -> int:
        """How many of a proposal's tokens to verify now, in a step that has `num_tokens` without them. 0: none,
        and they are paused, unless no plain step was measured yet that they could be held against.
        """
        if track.is_paused or num_drafted == 0 or not self.plain.is_known:
            return 0
        width, gain = self._best(track, num_drafted, num_tokens)
        if gain >= MARGIN:
            return width
        track.is_paused, track.confirmed = True, 0
        self.num_pauses += 1
        return 0

    def watch(self, track: Track, proposal: tuple[int, ...]) -> None:
        """Hold `proposal` against the tokens that come."""
        track.shadow, track.shadow_accepted = proposal, 0

    def verified(self, track: Track, num_drafted: int, num_accepted: int) -> None:
        """A round has come to this."""
        track.evidence.add(num_drafted, num_accepted)
        self.overall[track.kind].add(num_drafted, num_accepted, OVERALL_MEMORY)

    def watched(self, track: Track, tokens: Iterable[int], num_tokens: int) -> None:
        """`tokens` have come in plain steps: hold what is watched against them."""
        for token in tokens:
            if not track.shadow:
                return
            matches = token == track.shadow[track.shadow_accepted]
            track.shadow_accepted += matches
            if matches and track.shadow_accepted < len(track.shadow):
                continue
            self._shadow_ended(track, num_tokens)

    def _shadow_ended(self, track: Track, num_tokens: int) -> None:
        drafted, accepted = len(track.shadow), track.shadow_accepted
        track.shadow, track.shadow_accepted = (), 0
        track.evidence.add(drafted, accepted)
        paid = any(accepted + 1 >= self.break_even(width, num_tokens) for width in range(1, accepted + 1))
        track.confirmed = track.confirmed + 1 if paid else 0
        if track.confirmed >= NUM_CONFIRMATIONS and self._best(track, drafted, num_tokens)[1] >= MARGIN:
            track.is_paused = False

    def _round_s(self, num_drafted: int, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens` and so many draft tokens; their cost is guessed until measured."""
        seconds = self.rounds.of(num_tokens + num_drafted)
        if self.rounds.is_known:
            return seconds
        return seconds + num_drafted * self.draft_cost * self.plain.of(num_tokens)

    def _best(self, track: Track, num_drafted: int, num_tokens: int) -> tuple[int, float]:
        """The width that gives most tokens for its time, and how many times those of a plain step."""
        share = self.share(track)
        plain = num_tokens / self.plain.of(num_tokens)
        best, gain, given = 0, -math.inf, float(num_tokens)
        for width in range(1, num_drafted + 1):
            given += share**width
            pays = given / self._round_s(width, num_tokens) / plain
            if pays > gain:
                best, gain = width, pays
        return best, gain
