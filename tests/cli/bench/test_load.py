"""Closed and open loops on a clock of the tests' own: who asks when, and what waiting counts from."""

import asyncio
import heapq
import itertools
import random
import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest

from engine.errors import MlxcelError
from mlxcel_cli.bench.load import Load, kind_of, poisson
from mlxcel_cli.bench.mixes import Conversation
from mlxcel_cli.errors import Refused, ServerBusy, ServerFault, ServerGone
from mlxcel_cli.pieces import End, Piece, Text


class Clock:
    """Time that passes only when everybody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now_s + seconds, self._count, woken))
        await woken.wait()

    async def run(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done():
                self.now_s, _, woken = heapq.heappop(self._sleepers)
                woken.set()
        return task.result()


class Server:
    """Answers one request at a time, in order: two pieces, each after a second."""

    def __init__(self, clock: Clock, fault: MlxcelError | None = None) -> None:
        self.clock, self.fault = clock, fault
        self.asked: list[tuple[float, Sequence[Mapping[str, str]]]] = []
        self._turn = asyncio.Lock()

    async def chat(self, messages: Sequence[Mapping[str, str]], asked: Mapping[str, Any]) -> AsyncGenerator[Piece]:
        self.asked.append((self.clock.now_s, list(messages)))
        if self.fault is not None:
            raise self.fault
        async with self._turn:
            for word in ("Hel", "lo"):
                await self.clock.sleep(1.0)
                yield Text(word)
            yield End("stop", usage={"completion_tokens": 2, "prompt_tokens": 3})


def conversations(num: int, turns: int = 1) -> list[Conversation]:
    return [Conversation("system", ("question",) * turns) for _ in range(num)]


def load(clock: Clock, server: Server) -> Load:
    return Load(server, {}, now=clock.now, sleep=clock.sleep)  # type: ignore[arg-type]


def test_clients_of_a_closed_loop_ask_when_they_have_been_answered():
    async def run() -> None:
        clock = Clock()
        server = Server(clock)
        records = await clock.run(load(clock, server).closed(conversations(5), 2))
        assert [at for at, _ in server.asked] == [100.0, 100.0, 102.0, 104.0, 106.0]
        assert sorted(record.ttft_s for record in records) == [1.0, 3.0, 3.0, 3.0, 3.0]
        assert all(record.late_s == 0 for record in records)

    asyncio.run(run())


def test_an_open_loop_does_not_wait_for_answers_and_counts_from_the_moments():
    async def run() -> None:
        clock = Clock()
        server = Server(clock)
        records = await clock.run(load(clock, server).open(conversations(3), [0.0, 0.5, 1.0]))
        assert [at for at, _ in server.asked] == [100.0, 100.5, 101.0]
        assert [record.due_s for record in records] == [100.0, 100.5, 101.0]
        assert [record.ttft_s for record in records] == [1.0, 2.5, 4.0]
        assert [record.e2e_s for record in records] == [2.0, 3.5, 5.0]

    asyncio.run(run())


def test_a_sending_that_is_late_counts_as_waiting():
    async def run() -> None:
        clock = Clock()
        server = Server(clock)
        late = load(clock, server)

        async def slow_sleep(seconds: float) -> None:
            await clock.sleep(seconds + 2.0)  # the sender was held up

        late.sleep = slow_sleep
        (record,) = await clock.run(late.open(conversations(1), [1.0]))
        assert (record.due_s, record.sent_s, record.late_s) == (101.0, 103.0, 2.0)
        assert record.ttft_s == 3.0

    asyncio.run(run())


def test_turns_of_a_conversation_follow_each_other_with_what_was_said():
    async def run() -> None:
        clock = Clock()
        server = Server(clock)
        await clock.run(load(clock, server).closed(conversations(1, turns=2), 1))
        assert [at for at, _ in server.asked] == [100.0, 102.0]
        assert [m["role"] for m in server.asked[1][1]] == ["system", "user", "assistant", "user"]
        assert server.asked[1][1][2]["content"] == "Hello"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Refused("no", status=400), "refused (400)"),
        (ServerBusy("full"), "busy (503)"),
        (ServerGone("nobody", hint="is it running?"), "no connection"),
        (ServerGone("broke off"), "broken off"),
        (ServerFault("failed"), "server error"),
    ],
    ids=str,
)
def test_a_failure_is_counted_by_its_kind_and_ends_its_conversation(fault, kind):
    async def run() -> None:
        clock = Clock()
        server = Server(clock, fault)
        records = await clock.run(load(clock, server).closed(conversations(2, turns=3), 1))
        assert [record.error for record in records] == [kind, kind]
        assert kind_of(fault) == kind

    asyncio.run(run())


def test_poisson_moments_keep_to_rate_and_seed():
    moments = poisson(4.0, 4000, random.Random(5))
    assert moments == poisson(4.0, 4000, random.Random(5))
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.07)  # exponential: as wide as its mean
