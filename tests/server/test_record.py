"""The one log line of each request: why it ended, how much it was, and nothing of what was said."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, Gate, ScriptedSampler, Served, frames, served, tokens_of

pytestmark = pytest.mark.anyio

SECRET = "open-sesame"
BODY: dict[str, Any] = {"prompt": "hi", "seed": 1, "max_tokens": 8}
COUNTS = {"prompt_tokens", "cached_tokens", "completion_tokens"}


class Log:
    """The fields of the lines that were logged since it was last looked at."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        self._caplog = caplog

    async def one(self, service: Served) -> dict[str, Any]:
        """The one line since the last."""
        await service.exchanges_ended()
        [record] = [record for record in self._caplog.records if hasattr(record, "fields")]
        assert record.levelno == (logging.DEBUG if record.fields["route"].startswith("GET") else logging.INFO)
        self._caplog.clear()
        fields: dict[str, Any] = record.fields
        assert fields["total_ms"] >= fields.get("ttft_ms", 0.0) >= 0
        return fields


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


async def ask(service: Served, streamed: bool, **more: Any) -> None:
    await (service.stream if streamed else service.answer)(COMPLETIONS, BODY | more)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_is_one_line(tiny: Path, log: Log, streamed: bool) -> None:
    async with served(tiny, sampler=ScriptedSampler({1: tokens_of("abc")}, choices=2)) as service:
        await ask(service, streamed, user="someone")
        fields = await log.one(service)
        assert fields["id"].startswith("cmpl-")
        assert (fields["route"], fields["model"], fields["user"]) == (f"POST {COMPLETIONS}", "tiny", "someone")
        assert (fields["status"], fields["reason"]) == (200, "stop")
        assert [fields[name] for name in sorted(COUNTS)] == [0, 4, 2]
        assert fields["ttft_ms"] > 0
        await ask(service, streamed, max_tokens=2, n=2, prompt=[[5, 6, 7]])
        fields = await log.one(service)
        assert fields["reason"] == "length"
        assert [fields[name] for name in sorted(COUNTS)] == [0, 4, 3]


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_is_refused_says_why(tiny: Path, log: Log, streamed: bool) -> None:
    async with served(tiny, ctx_size=32, max_queue_depth=0, parallel=1) as service:
        for path, body, status, reason in (
            (COMPLETIONS, {"prompt": "a", "nonsense": 1}, 400, "invalid_request_error"),
            (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model_not_found"),
            (COMPLETIONS, {"prompt": "a" * 99}, 400, "context_length_exceeded"),
            ("/v1/nothing", {}, 404, "not_found"),
        ):
            await service.post(path, body | {"stream": streamed}, headers={"x-request-id": "mine"})
            fields = await log.one(service)
            assert (fields["id"], fields["route"]) == ("mine", f"POST {path}")
            assert (fields["status"], fields["reason"]) == (status, reason)
            assert not fields.keys() & COUNTS


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_step_that_fails_is_the_reason(tiny: Path, log: Log, streamed: bool, num_tokens: int) -> None:
    script: list[int | Exception] = [*tokens_of("ab")[:num_tokens], RuntimeError(SECRET)]
    async with served(tiny, sampler=ScriptedSampler({1: script})) as service:
        await service.post(COMPLETIONS, BODY | {"stream": streamed})
        fields = await log.one(service)
        assert (fields["status"], fields["reason"]) == (200 if streamed else 500, "step_failed")
        assert fields["completion_tokens"] == num_tokens
        assert ("ttft_ms" in fields) == (num_tokens > 0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_is_the_reason(tiny: Path, log: Log, streamed: bool) -> None:
    async with served(tiny) as service:
        service.gate.shut()
        client = asyncio.ensure_future(service.post(COMPLETIONS, BODY | {"stream": streamed}))
        await service.gate.engine_held()
        client.cancel()
        await asyncio.wait([client])
        fields = await log.one(service)
        assert fields["reason"] == "client_gone"
        assert (fields["prompt_tokens"], fields["completion_tokens"]) == (2, 0)


async def test_a_client_that_leaves_in_the_middle_has_had_its_tokens(tiny: Path, log: Log) -> None:
    async with served(tiny, sampler=ScriptedSampler({1: tokens_of("x" * 50)})) as service:
        await leave_after_text(service, service.gate)
        fields = await log.one(service)
        assert (fields["status"], fields["reason"]) == (200, "client_gone")
        assert fields["completion_tokens"] == 1
        assert fields["ttft_ms"] > 0


async def leave_after_text(service: Served, gate: Gate) -> None:
    """Let one token come, and leave."""
    gate.shut()
    gate.let(1)
    body = BODY | {"stream": True, "max_tokens": 50}
    async with service.client.stream("POST", COMPLETIONS, json=body) as response:
        async for frame in frames(response):
            if frame.startswith("data: "):
                break


async def test_a_fault_of_ours_is_the_reason(tiny: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tiny) as service:

        def broken(*arguments: Any, **options: Any) -> None:
            raise KeyError("ours")

        monkeypatch.setattr(service.app.state.service.models.default.bridge, "submit", broken)
        assert (await service.post(COMPLETIONS, BODY)).status_code == 500
        fields = await log.one(service)
        assert (fields["status"], fields["reason"]) == (500, "internal_error")


async def test_what_only_looks_is_for_debuggers(tiny: Path, log: Log) -> None:
    async with served(tiny) as service:
        for path in ("/health", "/metrics", "/slots", "/v1/models"):
            await service.client.get(path)
            fields = await log.one(service)
            assert (fields["route"], fields["status"]) == (f"GET {path}", 200)
            assert "reason" not in fields


@pytest.mark.parametrize("streamed", [True, False])
async def test_nothing_that_was_said_is_logged(
    tiny: Path, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    sampler = ScriptedSampler({1: tokens_of(SECRET)})
    said = {
        CHAT: {"messages": [{"role": "user", "content": SECRET}], "stop": SECRET[::-1]},
        COMPLETIONS: {"prompt": SECRET, "logit_bias": {}},
    }
    async with served(tiny, sampler=sampler) as service:
        for path, body in said.items():
            for more in ({}, {"model": "other"}, {"temperature": -1}):
                await service.post(
                    f"{path}?key={SECRET}",
                    body | {"seed": 1, "stream": streamed} | more,
                    headers={"authorization": f"Bearer {SECRET}", "cookie": SECRET},
                )
    of_the_server = [record for record in caplog.records if not record.name.startswith(("httpx2", "httpcore2"))]
    everything = repr([{**vars(record), "said": record.getMessage()} for record in of_the_server])
    assert len(of_the_server) > 6
    assert SECRET not in everything
    assert SECRET[::-1] not in everything
