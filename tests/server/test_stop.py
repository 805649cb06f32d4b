"""A server that is told to stop: what ends within the grace is answered, everything else is told."""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from server import run
from tests.serving import CHAT, PATIENCE_S, Gate, WatchedEngine, live

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Stopping is no fault: nothing is logged as one."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_S", 0.02)


@pytest.mark.usefixtures("short_grace")
def test_what_outlasts_the_grace_is_told(tiny: Path) -> None:
    with live(tiny) as server, server.client() as client:
        with client.stream("POST", CHAT, json=BODY | {"stream": True, "max_tokens": 4000}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.stop()
            frames = [line for line in lines if line]
        assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert server.ended() == 0


@pytest.mark.usefixtures("short_grace")
def test_who_waits_for_the_model_is_told(tiny: Path) -> None:
    asked, loads = threading.Event(), threading.Event()

    def open_engine(config: EngineConfig) -> WatchedEngine:
        assert loads.wait(PATIENCE_S)
        return WatchedEngine(config)

    with live(tiny, open_engine=open_engine) as server, server.client() as client, ThreadPoolExecutor() as threads:
        wait = server.apps[0].state.service.models.default.bridge._loaded.wait

        async def heard() -> Any:
            asked.set()
            return await wait()

        server.apps[0].state.service.models.default.bridge._loaded.wait = heard
        waiting = threads.submit(client.post, CHAT, json=BODY)
        assert asked.wait(PATIENCE_S)
        server.stop()
        response = waiting.result(PATIENCE_S)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_stopped"
        loads.set()
        assert server.ended() == 0


def test_what_ends_within_the_grace_is_answered(tiny: Path) -> None:
    gate = Gate()

    def open_engine(config: EngineConfig) -> WatchedEngine:
        return WatchedEngine(config, gate=gate)

    with live(tiny, open_engine=open_engine) as server, server.client() as client:
        with client.stream("POST", CHAT, json=BODY | {"stream": True, "max_tokens": 5}) as response:
            gate.shut()
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.stop()
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.ended() == 0
