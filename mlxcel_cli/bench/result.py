"""What a measurement found, in one shape for table, JSON and page: what was asked, where, and the figures."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_cli.bench.record import Record
from mlxcel_cli.bench.speed import Point, Speed
from mlxcel_cli.bench.summary import Summary, medians, ratios

DIGITS = 6


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """Prefill and decode of a model in this process."""

    speed: Speed
    asked: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        points = [
            {
                "prompt_tokens": p.prompt_tokens,
                "batch": p.batch,
                "prefill": _rates(p.prefill),
                "decode": _rates(p.decode),
            }
            for p in self.speed.points
        ]
        head = {"kind": "speed", **_where(), "model": self.speed.model, "asked": dict(self.asked)}
        return _rounded({**head, "notes": list(self.speed.notes), "points": points})


@dataclass(frozen=True, slots=True)
class ServerRuns:
    """The runs against one server. `records` are those of the last run, for pictures."""

    url: str
    model: str
    runs: Sequence[Summary]
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class ServeResult:
    """How one server, or two in turn, bore a load."""

    servers: Sequence[ServerRuns]
    asked: Mapping[str, Any]

    @property
    def ratios(self) -> dict[str, list[float]]:
        """Of each figure: median, least and largest ratio of the first server's runs over the second's."""
        if len(self.servers) < 2:
            return {}
        first, second = self.servers
        return ratios(first.runs, second.runs)

    @property
    def failed(self) -> bool:
        """Whether a server answered nothing at all."""
        return any(all(run.num_failed == run.num_requests for run in server.runs) for server in self.servers)

    def body(self) -> dict[str, Any]:
        servers = [
            {
                "url": server.url,
                "model": server.model,
                "medians": medians(server.runs),
                "runs": [dataclasses.asdict(run) for run in server.runs],
            }
            for server in self.servers
        ]
        head = {"kind": "serve", **_where(), "asked": dict(self.asked)}
        compared = {
            name: dict(zip(("median", "least", "largest"), found, strict=True))
            for name, found in self.ratios.items()
        }
        return _rounded({**head, "servers": servers, **({"ratios": compared} if compared else {})})


def span(rates: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(rates), min(rates), max(rates)


def steps_per_s(point: Point) -> list[float]:
    """The last repeat's steps as rates of one row."""
    return [1 / step_s for step_s in point.steps_s if step_s > 0]


def _rates(rates: Sequence[float]) -> dict[str, Any]:
    median, least, largest = span(rates)
    return {"tokens_per_s": median, "least": least, "largest": largest, "repeats": list(rates)}


def _where() -> dict[str, Any]:
    return {
        "mlxcel": importlib.metadata.version("mlxcel"),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }


def _rounded(value: Any) -> Any:
    """`value` with its floats at a length that people read."""
    match value:
        case float():
            return round(value, DIGITS)
        case dict():
            return {name: _rounded(part) for name, part in value.items()}
        case list() | tuple():
            return [_rounded(part) for part in value]
        case _:
            return value
