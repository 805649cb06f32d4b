"""Many clients at once on a real socket: all are answered, or told at once to come back."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.config import EngineConfig
from tests.serving import COMPLETIONS, Gate, WatchedEngine, live

pytestmark = pytest.mark.anyio


def body(i: int) -> dict[str, Any]:
    return {"prompt": f"client {i % 10}", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize("host", ["127.0.0.1", "unix"])
async def test_200_requests_of_128_clients(tiny: Path, tmp_path: Path, host: str) -> None:
    where = str(tmp_path / "m.sock") if host == "unix" else host
    with live(tiny, where, max_queue_depth=256, parallel=8) as server:
        waiting = iter(range(200))
        answers: dict[int, str] = {}

        async def one_client(client: httpx2.AsyncClient) -> None:
            for i in waiting:
                response = await client.post(COMPLETIONS, json=body(i))
                assert response.status_code == 200
                answers[i] = response.json()["choices"][0]["text"]

        async with server.async_client() as client:
            alone = [
                (await client.post(COMPLETIONS, json=body(i))).json()["choices"][0]["text"] for i in range(10)
            ]
            await asyncio.gather(*(one_client(client) for _ in range(128)))
        assert sorted(answers) == list(range(200))
        assert all(text == alone[i % 10] for i, text in answers.items())


async def test_beyond_the_queue_clients_are_refused_at_once(tiny: Path) -> None:
    gate = Gate()

    def open_engine(config: EngineConfig) -> WatchedEngine:
        return WatchedEngine(config, gate=gate)

    with live(tiny, open_engine=open_engine, max_queue_depth=8, parallel=4) as server:
        async with server.async_client() as client:
            assert (await client.post(COMPLETIONS, json=body(0))).status_code == 200
            gate.shut()
            started_s = time.monotonic()
            asked = [asyncio.ensure_future(client.post(COMPLETIONS, json=body(i))) for i in range(128)]
            num_refused = 0
            while num_refused < 128 - 12:
                done, _ = await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
                assert done, "refusals wait for the queue"
                num_refused += len(done)
                asked = [task for task in asked if task not in done]
                for task in done:
                    assert task.result().status_code == 503
                    assert task.result().headers["retry-after"] == "1"
                    assert task.result().json()["error"]["code"] == "queue_full"
            assert time.monotonic() - started_s < 20
            gate.open()
            assert [(await task).status_code for task in asked] == [200] * 12
            assert (await client.post(COMPLETIONS, json=body(0))).status_code == 200
