"""Runs a load against one server, or against two in turn, and gives the figures."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.errors import UserError
from mlxcel_cli.address import shown
from mlxcel_cli.bench.load import Load, poisson
from mlxcel_cli.bench.mixes import Mix, conversations
from mlxcel_cli.bench.record import Record
from mlxcel_cli.bench.result import ServeResult, ServerRuns
from mlxcel_cli.bench.summary import Objective, Summary, summarize
from mlxcel_cli.client import Client
from mlxcel_cli.errors import EngineGone, Refused, ServerBusy, ServerFault, ServerGone

NAME_IT = "--model, or --against-model, names the one to ask for"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent. `rate` is in conversations a second, None: `clients` ask in a closed loop.

    `warmup` requests come before each server's first run and are not counted.
    """

    mix: Mix
    num_requests: int
    clients: int
    rate: float | None
    max_tokens: int
    seed: int
    num_words: int | None
    repeats: int
    warmup: int
    timeout_s: float
    ignore_eos: bool
    objective: Objective | None

    def body(self) -> dict[str, Any]:
        return {
            "mix": str(self.mix),
            "requests": self.num_requests,
            "clients": None if self.rate else self.clients,
            "rate": self.rate,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "words": self.num_words,
            "repeats": self.repeats,
            "ignore_eos": self.ignore_eos,
            "slo": None if self.objective is None else asdict(self.objective),
        }

    @property
    def fields(self) -> dict[str, Any]:
        """Of each request: only what every server of this API knows, unless more was asked for."""
        asked: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0}
        return {**asked, "ignore_eos": True} if self.ignore_eos else asked


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the model to ask it for (None: the first it lists) and the key to show."""

    url: str
    model: str | None = None
    key: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The URL as it may be shown."""
        return shown(self.url)


async def bear(plan: Plan, targets: list[Target], *, tell: Callable[[str], None]) -> ServeResult:
    """Every repeat on every server in turn, each repeat with texts of its own that all servers get alike. Every
    second repeat turns the order round, so that what one leaves behind does not always fall on the other.

    Raises UserError for a server that does not say which model it has, and what one that does not answer at all
    raises.
    """
    models = [target.model or await _first_model(target, plan.timeout_s) for target in targets]
    runs: list[list[Summary]] = [[] for _ in targets]
    records: list[list[Record]] = [[] for _ in targets]
    order = list(range(len(targets)))
    for repeat in range(plan.repeats):
        for place in order if repeat % 2 == 0 else order[::-1]:
            target = targets[place]
            async with Client.to(target.url, model=models[place], key=target.key) as client:
                if repeat == 0 and plan.warmup:
                    tell(f"{target.name}: warm-up")
                    await _run(plan, client, plan.warmup, f"warm {plan.seed}", lambda record: None)
                counted = _Counter(f"{target.name}: run {repeat + 1} of {plan.repeats}", plan.num_requests, tell)
                records[place] = await _run(plan, client, plan.num_requests, f"{plan.seed}-{repeat}", counted)
            runs[place].append(summarize(records[place], plan.objective))
    servers = [
        ServerRuns(target.name, model, taken, last)
        for target, model, taken, last in zip(targets, models, runs, records, strict=True)
    ]
    return ServeResult(servers, plan.body())


async def _run(
    plan: Plan, client: Client, num_requests: int, seed: str, told: Callable[[Record], None]
) -> list[Record]:
    load = Load(client, plan.fields, plan.timeout_s, told)
    made = conversations(plan.mix, num_requests, seed, plan.num_words)
    if plan.rate is None:
        return await load.closed(made, plan.clients)
    return await load.open(made, poisson(plan.rate, len(made), random.Random(f"{seed} arrivals")))


async def _first_model(target: Target, timeout_s: float) -> str:
    """The first model that the server lists. Raises UserError where it lists none, ServerGone where it is silent.

    `timeout_s` is what it may take, 0: anything.
    """
    why = ""
    try:
        async with Client.to(target.url, key=target.key) as client:
            names = await client.models(timeout_s or None)
    except ServerGone as gone:
        raise ServerGone(str(gone), hint=gone.hint or NAME_IT) from gone
    except (ServerBusy, EngineGone):
        raise
    except (ServerFault, Refused) as fault:
        if isinstance(fault, Refused) and fault.status in (401, 403):
            raise
        names, why = [], f": {fault}"
    if not any(names):
        raise UserError(f"{target.name} lists no model{why}", hint=NAME_IT)
    return next(filter(None, names))


class _Counter:
    """Tells how many records there are."""

    def __init__(self, title: str, num_requests: int, tell: Callable[[str], None]) -> None:
        self._title, self._num_requests, self._tell = title, num_requests, tell
        self._done = self._failed = 0

    def __call__(self, record: Record) -> None:
        self._done += 1
        self._failed += bool(record.error)
        failed = f", {self._failed} failed" if self._failed else ""
        self._tell(f"{self._title}: {self._done} of {self._num_requests} requests{failed}")
