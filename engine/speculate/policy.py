"""What was found out about drafting for one model on this machine: said to whoever asks, and kept between runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.request import DraftStats
from engine.speculate.governor import FIRST_GUESS, Costs, Evidence, Governor


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
class DraftPolicy:
    """Who drafts for `target`, how much of that is accepted, and which widths pay."""

    kind: str
    target: str
    drafter: str
    machine: str
    block_size: int
    accepted_share: float
    plain_step_ms: float | None
    widths: tuple[WidthVerdict, ...]
    stats: DraftStats


@dataclass(frozen=True, slots=True)
class Pair:
    """What a verdict is about, in words."""

    target: str
    drafter: str
    machine: str


def policy_of(pair: Pair, kind: str, block_size: int, governor: Governor, stats: DraftStats) -> DraftPolicy:
    """The verdicts as they stand."""
    share = governor.overall.share(FIRST_GUESS)
    plain, rounds = governor.plain.table(), governor.rounds.table()
    widths = []
    for width in range(1, block_size + 1):
        expected, break_even = governor.expected(share, width), governor.break_even(width)
        step = _ms(rounds.get(1 + width))
        widths.append(WidthVerdict(width, step, round(expected, 3), round(break_even, 3), expected > break_even))
    return DraftPolicy(
        kind, pair.target, pair.drafter, pair.machine, block_size, round(share, 3), _ms(plain.get(1)),
        tuple(widths), stats,
    )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def remembered(read: Callable[[], Any]) -> Governor:
    """A governor that goes on with what an earlier run has kept, if it can be read."""
    said = read()
    try:
        plain = Costs(_seconds(said["plain_s"]))
        rounds = Costs(_seconds(said["rounds_s"]), plain)
        return Governor(plain, rounds, Evidence(float(said["accepted"]), float(said["wrong"])))
    except (TypeError, KeyError, ValueError, AttributeError):
        plain = Costs()
        return Governor(plain, Costs(like=plain))


def kept(governor: Governor) -> dict[str, Any]:
    """What the next run is to know, as JSON has it."""
    return {
        "plain_s": governor.plain.table(),
        "rounds_s": governor.rounds.table(),
        "accepted": governor.overall.accepted,
        "wrong": governor.overall.wrong,
    }


def _seconds(said: Mapping[str, Any]) -> dict[int, float]:
    """Raises ValueError for times that are none."""
    seconds = {int(count): float(value) for count, value in said.items()}
    if not all(value > 0 and count > 0 for count, value in seconds.items()):
        raise ValueError("a step takes time")
    return seconds
