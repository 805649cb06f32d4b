"""The header X-Priority: who gets the next free slot, and what is no priority."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, Served, served

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def asked(service: Served, path: str, name: str, priority: str, *, streamed: bool) -> "asyncio.Task[Any]":
    headers = {"x-request-id": name} | ({"X-Priority": priority} if priority else {})
    return asyncio.create_task(service.post(path, BODIES[path] | {"stream": streamed}, headers=headers))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_next_slot_goes_by_priority(tiny: Path, path: str, streamed: bool) -> None:
    async with served(tiny, parallel=1) as service:
        service.gate.shut()
        running = asked(service, path, "first", "", streamed=streamed)
        await service.gate.engine_held()
        waiting = []
        for number, priority in enumerate(("low", "", "high", "normal", "low", "high")):
            name = f"{priority or 'unsaid'}-{number}"
            waiting.append(asked(service, path, name, priority, streamed=streamed))
            await service.submitted(number + 2)
        service.gate.open()
        responses = await asyncio.gather(running, *waiting)
        assert {response.status_code for response in responses} == {200}
        order = dict.fromkeys(row.request.id for tick in service.engine.ticks for row in tick.rows)
        assert list(order) == ["first", "high-2", "high-5", "unsaid-1", "normal-3", "low-0", "low-4"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_anything_else_is_refused_by_name(tiny: Path, path: str, streamed: bool) -> None:
    async with served(tiny) as service:
        for priority in ("urgent", "HIGH", "1", "high, low", "x" * 5000):
            response = await asked(service, path, "id", priority, streamed=streamed)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "X-Priority")
            assert "high, normal, low" in error["message"]
            assert priority[:100] in error["message"]
            assert len(error["message"]) < 300
        twice = [("x-priority", "high"), ("x-priority", "low")]
        assert (await service.post(path, BODIES[path], headers=twice)).status_code == 400
        assert service.engine.rows == []
