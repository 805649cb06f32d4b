"""A request is ended from elsewhere, or by the clock: its client hears of it and its row is freed."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.config import EngineConfig
from tests.serving import (
    CHAT,
    COMPLETIONS,
    PATIENCE_S,
    ScriptedSampler,
    Served,
    WatchedEngine,
    served,
    settle,
    tokens_of,
)

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"prompt": "hi", "seed": 1, "max_tokens": 100}
LONG = ScriptedSampler({1: tokens_of("x" * 200)}, choices=2)
MINE = {"x-request-id": "mine"}


async def cancel(service: Served, request_id: str = "mine") -> httpx2.Response:
    return await service.post(f"/v1/requests/{request_id}/cancel", None)


def check_cancelled(error: dict[str, Any]) -> None:
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_cancelled")
    assert "mine" in error["message"]


@pytest.mark.parametrize("num_ticks", [0, 1, 5])
async def test_an_answer_that_runs(tiny: Path, num_ticks: int) -> None:
    async with served(tiny, sampler=LONG) as service:
        service.gate.shut()
        service.gate.let(num_ticks)
        asked = asyncio.ensure_future(service.post(COMPLETIONS, BODY | {"n": 2}, headers=MINE))
        await service.gate.engine_held()
        assert (await cancel(service)).json() == {"id": "mine", "object": "request.cancelled", "cancelled": 1}
        response = await asked  # before the engine goes on
        assert response.status_code == 499
        check_cancelled(response.json()["error"])
        service.gate.let(1)  # the tick that runs
        await asyncio.to_thread(settle, service.loop)
        assert all(row.storage is None for row in service.engine.rows)
        assert (await cancel(service)).status_code == 404


async def test_a_stream_that_runs(tiny: Path) -> None:
    async with served(tiny, sampler=LONG) as service:
        service.gate.shut()
        service.gate.let(3)
        asked = asyncio.ensure_future(service.client.post(COMPLETIONS, json=BODY | {"stream": True}, headers=MINE))
        await service.gate.engine_held()
        await cancel(service)
        response = await asked
        assert response.status_code == 200
        *_, last = [frame for frame in response.text.split("\n\n") if frame.startswith("data: ")]
        assert '"code":"request_cancelled"' in last
        assert "[DONE]" not in response.text
        service.gate.open()


async def test_a_request_that_waits_never_starts(tiny: Path) -> None:
    async with served(tiny, sampler=LONG, parallel=1) as service:
        service.gate.shut()
        first = asyncio.ensure_future(service.post(COMPLETIONS, BODY | {"max_tokens": 3}))
        await service.gate.engine_held()
        waits = asyncio.ensure_future(service.post(COMPLETIONS, BODY, headers=MINE))
        await service.submitted(2)
        await cancel(service)
        check_cancelled((await waits).json()["error"])
        service.gate.open()
        assert (await first).status_code == 200
        assert [row for row in service.engine.rows if service.engine.ran(row)] == service.engine.rows[:1]


async def test_the_id_of_an_answer_will_do(tiny: Path) -> None:
    async with served(tiny, sampler=LONG) as service:
        service.gate.shut()
        service.gate.let(2)
        body = BODY | {"stream": True}
        async with service.client.stream("POST", COMPLETIONS, json=body) as response:
            text = response.aiter_text()
            first = await anext(text)
            answer_id = response.headers["x-request-id"]
            assert answer_id in first + await anext(text)
            assert (await cancel(service, answer_id)).status_code == 200
            rest = "".join([piece async for piece in text])
        assert "request_cancelled" in rest
        service.gate.open()


async def test_all_that_share_an_id(tiny: Path) -> None:
    async with served(tiny, sampler=LONG) as service:
        service.gate.shut()
        asked = [asyncio.ensure_future(service.post(COMPLETIONS, BODY, headers=MINE)) for _ in range(3)]
        await service.submitted(3)
        assert (await cancel(service)).json()["cancelled"] == 3
        assert [response.status_code for response in await asyncio.gather(*asked)] == [499] * 3
        service.gate.open()


async def test_what_does_not_run(tiny: Path) -> None:
    async with served(tiny) as service:
        await service.client.post(COMPLETIONS, json=BODY | {"max_tokens": 1}, headers=MINE)
        for request_id in ("mine", "never", "x" * 500):
            response = await cancel(service, request_id)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "request_not_found"


@pytest.fixture
def loading(tiny: Path) -> Iterator[threading.Event]:
    loads = threading.Event()
    yield loads
    loads.set()


async def test_a_request_that_waits_for_the_model(tiny: Path, loading: threading.Event) -> None:
    def open_engine(config: EngineConfig) -> WatchedEngine:
        assert loading.wait(PATIENCE_S)
        return WatchedEngine(config)

    async with served(tiny, open_engine=open_engine) as service:
        hi = {"messages": [{"role": "user", "content": "hi"}]}
        waits = asyncio.ensure_future(service.post(CHAT, hi, headers=MINE))
        while (await cancel(service)).status_code == 404:
            await asyncio.sleep(0)
        check_cancelled((await waits).json()["error"])
        loading.set()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_that_takes_too_long(tiny: Path, streamed: bool) -> None:
    async with served(tiny, sampler=LONG, server={"request_timeout": 0.05}) as service:
        service.gate.shut()
        response = await service.post(COMPLETIONS, BODY | {"stream": streamed})
        assert response.status_code == (200 if streamed else 504)
        assert "request_timeout" in response.text
        assert "[DONE]" not in response.text
        service.gate.open()
        await asyncio.to_thread(settle, service.loop)
