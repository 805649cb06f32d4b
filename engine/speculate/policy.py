"""What was found out about drafting for one model on this machine: said to whoever asks, and kept between runs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import DraftCounts
from engine.speculate.governor import Costs, Evidence, Governor

MOST_S = 1e6  # that a step may have taken for its time to be believed


@dataclass(frozen=True, slots=True)
class WidthVerdict:
    """Whether rounds of `width` draft tokens pay for a row alone: they give `expected` tokens for the time in
    which plain steps give `break_even`. `step_ms` is their time where it was measured.
    """

    width: int
    step_ms: float | None
    expected: float
    break_even: float
    pays: bool


@dataclass(frozen=True, slots=True)
class KindVerdict:
    """How much of one kind of proposals is accepted, and which widths pay. `num_same`: behind how many tokens that
    came before, or more; 0 where a model drafts.
    """

    num_same: int
    accepted_share: float
    widths: tuple[WidthVerdict, ...]


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Who drafts for `target` on which machine, and the verdicts by the kind of proposals."""

    kind: str
    target: str
    drafter: str
    machine: str
    block_size: int
    plain_step_ms: float | None
    verdicts: tuple[KindVerdict, ...]
    stats: DraftCounts


@dataclass(frozen=True, slots=True)
class Pair:
    """What a verdict is about, in words."""

    target: str
    drafter: str
    machine: str


def policy_of(
    pair: Pair, block_size: int, governor: Governor, stats: DraftCounts, same: Sequence[int]
) -> DraftPolicy:
    """The verdicts as they stand; `same` are the kinds' least numbers of tokens that came before."""
    verdicts = tuple(
        KindVerdict(num_same, round(governor.overall_share(kind), 3), tuple(_widths(governor, kind, block_size)))
        for kind, num_same in enumerate(same)
    )
    plain = _ms(governor.plain.table().get(1))
    return DraftPolicy(stats.kind, pair.target, pair.drafter, pair.machine, block_size, plain, verdicts, stats)


def _widths(governor: Governor, kind: int, block_size: int) -> Iterator[WidthVerdict]:
    share, rounds = governor.overall_share(kind), governor.rounds.table()
    for width in range(1, block_size + 1):
        expected, break_even = governor.expected(share, width), governor.break_even(width)
        step = _ms(rounds.get(1 + width))
        yield WidthVerdict(width, step, round(expected, 3), round(break_even, 3), expected > break_even)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def remembered(read: Callable[[], Any], guesses: Sequence[float]) -> Governor:
    """A governor that goes on with what an earlier run has kept, if it can be read."""
    said = read()
    try:
        plain = Costs(_seconds(said["plain_s"]))
        rounds = Costs(_seconds(said["rounds_s"]), plain)
        seen = [_evidence(*pair) for pair in said["seen"]]
        return Governor(plain, rounds, dict(enumerate(seen[: len(guesses)])), guesses=guesses)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        plain = Costs()
        return Governor(plain, Costs(like=plain), guesses=guesses)


def kept(governor: Governor) -> dict[str, Any]:
    """What the next run is to know, as JSON has it."""
    return {
        "plain_s": governor.plain.table(),
        "rounds_s": governor.rounds.table(),
        "seen": [[seen.accepted, seen.wrong] for _, seen in sorted(governor.overall.items())],
    }


def _seconds(said: Mapping[str, Any]) -> dict[int, float]:
    """Raises ValueError for times that are none."""
    seconds = {int(count): float(value) for count, value in said.items()}
    if not all(count > 0 and 0 < value < MOST_S for count, value in seconds.items()):
        raise ValueError("a step takes time, and no more than that")
    return seconds


def _evidence(accepted: float, wrong: float) -> Evidence:
    """Raises ValueError for counts that are none."""
    if not (0 <= accepted < math.inf and 0 <= wrong < math.inf):
        raise ValueError("what was seen is a number of tokens")
    return Evidence(float(accepted), float(wrong))
