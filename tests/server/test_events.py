"""`/events`: the stages of requests and the numbers as they change, for whoever watches, and no word of text."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.metrics import Numbers
from engine.watch import Moment
from server.bridge import Bridge
from server.feed import MAX_HELD, Feed, Watcher
from server.run import GRACE_S
from tests.server.roles.parts import parts
from tests.serving import CHAT, COMPLETIONS, PATIENCE_S, Gate, Served, frames, live, served

pytestmark = pytest.mark.anyio

SECRET = "a word of the prompt"
BODY: dict[str, Any] = {"prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
MORE = {"headers": {"x-request-id": "of-mine"}}


@asynccontextmanager
async def watched(client: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The frames of `/events`, the first of them read: whoever asks after this is heard."""

    async def told(response: Any) -> AsyncIterator[dict[str, Any]]:
        async for frame in frames(response):
            if frame.startswith("data: "):
                yield json.loads(frame[6:])

    async with client.stream("GET", "/events") as response, aclosing(told(response)) as events:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        first = await anext(events)
        assert first["type"] == "snapshot"
        yield events


async def until_ended(events: AsyncIterator[dict[str, Any]], count: int = 1) -> list[dict[str, Any]]:
    """The stages up to the end of so many requests."""
    stages: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while sum(stage["type"] == "ended" for stage in stages) < count:
            frame = await anext(events)
            if frame["type"] != "snapshot":
                stages.append(frame)
    return stages


async def test_a_request_from_its_arrival_to_its_end(tiny: Path) -> None:
    async with (
        served(tiny, prefill_chunk_size=16, no_prompt_cache=True) as service,
        watched(service.client) as events,
    ):
        await service.post(COMPLETIONS, {**BODY, "prompt": "x" * 40}, **MORE)
        stages = await until_ended(events)
        snapshot = await anext(events)
    assert [stage["type"] for stage in stages] == [
        "queued", "started", "piece", "piece", "piece", "first_token", "ended",
    ]  # fmt: skip
    assert {(stage["id"], stage["task"], stage["choice"], stage["prompt_tokens"]) for stage in stages} == {
        ("of-mine", 0, 0, 40)
    }
    assert [stage["stored_tokens"] for stage in stages if stage["type"] == "piece"] == [16, 32, 40]
    assert stages[-1] | {"outcome": "length", "new_tokens": 5} == stages[-1]
    assert all("outcome" not in stage for stage in stages[:-1])
    assert sorted(stage["at_s"] for stage in stages) == [stage["at_s"] for stage in stages]
    assert (snapshot["type"], snapshot["prompt_tokens"], snapshot["completion_tokens"]) == ("snapshot", 40, 5)
    assert (snapshot["requests"]["length"], snapshot["queue_depth"], snapshot["slots"]) == (1, 0, [None] * 4)


async def test_what_runs_stands_in_the_snapshot_of_one_who_comes_later(tiny: Path) -> None:
    gate = Gate()
    async with served(tiny, gate=gate) as service:
        gate.shut()
        asking = asyncio.create_task(service.post(COMPLETIONS, BODY, **MORE))
        await service.submitted(1)
        gate.let(2)
        await gate.engine_held()
        async with service.client.stream("GET", "/events") as response, aclosing(frames(response)) as told:
            snapshot = json.loads((await anext(told)).removeprefix("data: "))
            gate.open()
            await asking
    [slot] = [slot for slot in snapshot["slots"] if slot]
    assert (slot["id"], slot["task"], slot["prompt_tokens"]) == ("of-mine", 0, len(SECRET))


async def test_one_who_leaves_is_told_as_such(tiny: Path) -> None:
    gate = Gate()
    async with served(tiny, gate=gate) as service, watched(service.client) as events:
        gate.shut()
        asking = asyncio.create_task(service.post(COMPLETIONS, BODY))
        await gate.engine_held()
        asking.cancel()
        gate.open()
        stages = await until_ended(events)
    assert stages[-1]["outcome"] == "cancelled"


async def test_no_text_is_told(tiny: Path) -> None:
    async with served(tiny) as service, watched(service.client) as events:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, "ignore_eos": True}
        answer = await service.answer(CHAT, body)
        told = json.dumps(await until_ended(events))
    assert SECRET not in told
    assert answer["choices"][0]["message"]["content"] not in told


def listener(service: Served) -> Any:
    return service.loop.watch.listener


async def test_the_engine_tells_while_somebody_listens(tiny: Path) -> None:
    async with served(tiny) as service:
        assert listener(service) is None
        async with watched(service.client):
            async with watched(service.client):
                assert listener(service) is not None
            await service.exchanges_ended(but=1)
            assert listener(service) is not None
        await service.exchanges_ended()
        assert listener(service) is None
        assert service.app.state.service.models.default.feed._looking is None


async def test_a_key_is_needed(tiny: Path) -> None:
    async with served(tiny, server={"api_key": ("sk-one",)}) as service:
        assert (await service.client.get("/events")).status_code == 401
        service.client.headers["authorization"] = "Bearer sk-one"
        async with watched(service.client):
            pass


async def test_silence_is_broken(tiny: Path) -> None:
    async with served(tiny, keep_alive_s=0.05) as service, service.client.stream("GET", "/events") as response:
        told = frames(response)
        assert (await anext(told)).startswith("data: ")
        assert await anext(told) == ": keep-alive"


def test_a_server_that_stops_waits_for_no_watcher(tiny: Path) -> None:
    with live(tiny) as server, server.client() as client, client.stream("GET", "/events") as response:
        begun = time.monotonic()
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.stop()
        assert [line for line in lines if line.startswith("data: ")] == []
        server._thread.join(PATIENCE_S)
        assert time.monotonic() - begun < GRACE_S


async def test_a_router_tells_of_what_its_nodes_run(tiny: Path) -> None:
    async with parts(tiny) as one, watched(one.client) as events:
        assert (await one.post(COMPLETIONS, BODY)).status_code == 200
        stages = await until_ended(events)
        assert (await one.client.get("/")).status_code == 200
    kinds = [stage["type"] for stage in stages]
    assert kinds[:2] == ["queued", "started"]
    assert kinds[-2:] == ["first_token", "ended"]
    assert "piece" in kinds
    assert stages[-1]["new_tokens"] == 5


def stages_of(first: int, count: int) -> list[dict[str, Any]]:
    return [{"type": "piece", "task": number} for number in range(first, first + count)]


async def test_one_who_does_not_read_loses_the_oldest_and_hears_of_it() -> None:
    watcher = Watcher({"type": "snapshot", "at_s": 0})
    for number in range(MAX_HELD + 10):
        watcher.tell(stages_of(number, 1))
        watcher.show({"type": "snapshot", "at_s": number})
    watcher.end()
    missed, *stages, snapshot = [frame async for frame in watcher]
    assert missed == {"type": "missed", "num_stages": 10}
    assert stages == stages_of(10, MAX_HELD)
    assert snapshot == {"type": "snapshot", "at_s": MAX_HELD + 9}


class StillBridge(Bridge):
    """A bridge whose numbers are given, and which says how often it was asked for them."""

    def __init__(self) -> None:
        self.given = Numbers()
        self.num_asked = 0
        self.asked = asyncio.Event()

    def numbers(self) -> Numbers:
        self.num_asked += 1
        self.given.at_s += 1
        self.asked.set()
        return self.given

    def slots(self) -> list[None]:
        return [None]

    def listen(self, hear: Any) -> None:
        pass

    async def looked_at(self, times: int) -> None:
        until = self.num_asked + times
        while self.num_asked < until:
            self.asked.clear()
            await self.asked.wait()


async def test_a_snapshot_comes_when_a_number_has_changed() -> None:
    bridge = StillBridge()
    feed = Feed(bridge, every_s=0)
    one, other = feed.watch(), feed.watch()
    await bridge.looked_at(5)
    assert [watcher._next()["at_s"] for watcher in (one, other)] == [1, 2]  # type: ignore[index]
    assert one._next() is None
    bridge.given.completion_tokens = 3
    await bridge.looked_at(5)
    shown = one._next()
    assert shown is not None
    assert shown["completion_tokens"] == 3
    assert other._next() is shown, "one snapshot is made for all"
    assert one._next() is None
    feed.leave(one)
    feed.end()
    assert feed._looking is None


async def test_stages_are_heard_on_the_event_loop(tiny: Path) -> None:
    heard: list[int] = []
    async with served(tiny) as service:

        def hear(moments: list[Moment]) -> None:
            heard.append(threading.get_ident())

        service.app.state.service.models.default.bridge.listen(hear)
        await service.post(COMPLETIONS, BODY)
    assert set(heard) == {threading.get_ident()}
