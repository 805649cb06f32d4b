"""The figures of many requests: percentiles, rates, what kept to an objective, what failed. Pure arithmetic."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxcel_cli.bench.record import Record
from mlxcel_cli.errors import WrongUsage

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
OBJECTIVES = ("ttft", "itl", "e2e")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the `ordered` values lie, between two of them in proportion."""
    assert ordered, "there is no percentile of nothing"
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True)
class Spread:
    """How values in seconds are spread; `curve` are those at each hundredth, from the least to the largest."""

    p50: float
    p90: float
    p99: float
    mean: float
    largest: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        shares = {name: percentile(ordered, share) for name, share in SHARES.items()}
        curve = tuple(percentile(ordered, hundredth / 100) for hundredth in range(101))
        return cls(**shares, mean=statistics.fmean(ordered), largest=ordered[-1], curve=curve)


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds that a request may take at most to count as good: to its first token, for each further token on
    average, and as a whole. None: any.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Of `ttft=0.5,itl=0.05,e2e=10`. Raises WrongUsage."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                bound = float(value.removesuffix("s"))
            except ValueError:
                bound = -1.0
            if name not in OBJECTIVES or name in bounds or not 0 < bound < float("inf"):
                why = f"is a second bound of {name}" if name in bounds else "is no objective"
                hint = "write seconds such as --slo ttft=0.5,itl=0.05,e2e=10"
                raise WrongUsage(f"--slo: {part.strip()!r} {why}", hint=hint)
            bounds[name] = bound
        return cls(**bounds)

    def met_by(self, record: Record) -> bool:
        """Whether `record` is whole and within every bound."""
        if not record.succeeded:
            return False
        pairs = ((self.ttft, record.ttft_s), (self.itl, record.token_s), (self.e2e, record.e2e_s))
        return all(bound is None or taken <= bound for bound, taken in pairs)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Rates are over `duration_s`, from the first request's due time to the last piece.

    `good_share` is that of all requests which met the objective, `goodput` their number a second. `counted_by`
    says who counted the tokens: the server, or this side by pieces of text. `late_s` is the largest delay of a
    sending.
    """

    num_requests: int
    num_failed: int
    errors: Mapping[str, int]
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    counted_by: str
    late_s: float
    good_share: float | None = None
    goodput: float | None = None
    ttft_s: Spread | None = None
    itl_s: Spread | None = None
    e2e_s: Spread | None = None
    tokens_over_time: Sequence[float] = field(default=())

    @property
    def figures(self) -> dict[str, float]:
        """Everything that two runs can be compared by."""
        figures: dict[str, float] = {}
        for name in ("ttft_s", "itl_s", "e2e_s"):
            spread: Spread | None = getattr(self, name)
            if spread is not None:
                figures |= {f"{name} {share}": getattr(spread, share) for share in SHARES}
        figures["tokens_per_s"] = self.tokens_per_s
        figures["requests_per_s"] = self.requests_per_s
        return figures if self.goodput is None else {**figures, "goodput": self.goodput}


def summarize(records: Sequence[Record], objective: Objective | None = None, *, num_bins: int = 40) -> Summary:
    """The figures of `records`, of which there is one at least."""
    whole = [record for record in records if record.succeeded]
    began_s = min(record.due_s for record in records)
    ended_s = max((record.pieces_s[-1] for record in whole), default=max(record.ended_s for record in records))
    duration_s = max(ended_s - began_s, 1e-9)
    completion_tokens = sum(record.completion_tokens for record in whole)
    num_good = sum(objective.met_by(record) for record in records) if objective else None
    counts = {record.counted_by_server for record in whole}
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(whole),
        errors=dict(Counter(record.error or "no text" for record in records if not record.succeeded)),
        duration_s=duration_s,
        requests_per_s=len(whole) / duration_s,
        tokens_per_s=completion_tokens / duration_s,
        prompt_tokens=sum(record.prompt_tokens for record in whole),
        cached_tokens=sum(record.cached_tokens for record in whole),
        completion_tokens=completion_tokens,
        counted_by=" and ".join({True: "server", False: "pieces"}[kind] for kind in sorted(counts, reverse=True)),
        late_s=max(record.late_s for record in records),
        good_share=None if num_good is None else num_good / len(records),
        goodput=None if num_good is None else num_good / duration_s,
        ttft_s=Spread.of([record.ttft_s for record in whole]),
        itl_s=Spread.of([gap for record in whole for gap in record.gaps_s]),
        e2e_s=Spread.of([record.e2e_s for record in whole]),
        tokens_over_time=over_time([at for r in whole for at in r.pieces_s], began_s, duration_s, num_bins),
    )


def over_time(moments_s: Sequence[float], began_s: float, duration_s: float, num_bins: int) -> list[float]:
    """How many of the moments lie in each of `num_bins` equal parts of the duration, a second."""
    bin_s = duration_s / num_bins
    counts = [0] * num_bins
    for moment_s in moments_s:
        counts[min(int((moment_s - began_s) / bin_s), num_bins - 1)] += 1
    return [count / bin_s for count in counts]


def medians(runs: Sequence[Summary]) -> dict[str, float]:
    """The median over the runs of each figure that all of them have."""
    figures = [run.figures for run in runs]
    return {
        name: statistics.median(figure[name] for figure in figures)
        for name in figures[0]
        if all(name in figure for figure in figures)
    }


def ratios(ours: Sequence[Summary], theirs: Sequence[Summary]) -> dict[str, list[float]]:
    """For each figure the median, least and largest ratio of the runs, ours over theirs, taken in pairs."""
    pairs = [(one.figures, other.figures) for one, other in zip(ours, theirs, strict=True)]
    named: dict[str, list[float]] = {}
    for name in pairs[0][0]:
        taken = [one[name] / other[name] for one, other in pairs if one.get(name) and other.get(name)]
        if taken:
            named[name] = [statistics.median(taken), min(taken), max(taken)]
    return named
