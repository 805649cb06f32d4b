"""Every kind of error in every dialect's shape, before a stream and in one, as the official client takes it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.errors import (
    ContextLengthExceeded,
    EngineStopped,
    ModelNotFound,
    NeverFits,
    NoChatTemplate,
    QueueFull,
    RequestError,
    StepFailed,
    TemplateFailed,
)
from server.errors import (
    BodyTooLarge,
    Cancelled,
    Foreign,
    NoRoute,
    NotSupported,
    Shape,
    TimedOut,
    Unauthorized,
    UnknownModel,
    UnknownRequest,
    error_body,
    error_response,
    shape_of,
    status_of,
)
from server.sse import EventStream
from tests.serving import Gate, Live, ScriptedSampler, WatchedEngine, live, tokens_of

INVALID, SERVER = "invalid_request_error", "server_error"

# The error, its status, its code for OpenAI, its types for OpenAI, Anthropic and llama-server.
TABLE: tuple[tuple[Exception, int, str | None, str, str, str], ...] = (
    (RequestError("m", param="p"), 400, None, INVALID, INVALID, INVALID),
    (TemplateFailed("m", param="p"), 400, None, INVALID, INVALID, INVALID),
    (ContextLengthExceeded(9, 8), 400, "context_length_exceeded", INVALID, INVALID, INVALID),
    (NeverFits("m"), 400, "memory_exceeded", INVALID, INVALID, INVALID),
    (NoChatTemplate("m"), 400, "no_chat_template", INVALID, INVALID, INVALID),
    (Unauthorized("m"), 401, "invalid_api_key", INVALID, "authentication_error", "authentication_error"),
    (Foreign("m"), 403, "foreign_origin", INVALID, "permission_error", "permission_error"),
    (UnknownModel("m"), 404, "model_not_found", INVALID, "not_found_error", "not_found_error"),
    (UnknownRequest("m"), 404, "request_not_found", INVALID, "not_found_error", "not_found_error"),
    (NoRoute("m", 404), 404, "not_found", INVALID, "not_found_error", "not_found_error"),
    (NoRoute("m", 405), 405, None, INVALID, INVALID, INVALID),
    (BodyTooLarge("m"), 413, "body_too_large", INVALID, "request_too_large", INVALID),
    (Cancelled("m"), 499, "request_cancelled", INVALID, INVALID, INVALID),
    (StepFailed("m"), 500, "step_failed", SERVER, "api_error", SERVER),
    (KeyError("m"), 500, "internal_error", SERVER, "api_error", SERVER),
    (NotSupported("m"), 501, None, "not_supported_error", "not_supported_error", "not_supported_error"),
    (QueueFull("m"), 503, "queue_full", SERVER, "overloaded_error", "unavailable_error"),
    (EngineStopped("m"), 503, "engine_stopped", SERVER, "overloaded_error", "unavailable_error"),
    (ModelNotFound("m"), 503, "model_not_loaded", SERVER, "overloaded_error", "unavailable_error"),
    (TimedOut("m"), 504, "request_timeout", SERVER, "timeout_error", SERVER),
)
ids = [f"{type(row[0]).__name__} {row[1]}" for row in TABLE]


def bodies(row: tuple[Exception, int, str | None, str, str, str]) -> dict[Shape, dict[str, Any]]:
    error, status, code, *types = row
    message = error_body(error)["error"]["message"]
    param = getattr(error, "param", None) or None
    return {
        "openai": {"error": {"message": message, "type": types[0], "param": param, "code": code}},
        "anthropic": {"type": "error", "error": {"type": types[1], "message": message}},
        "llama": {"error": {"code": status, "message": message, "type": types[2]}},
    }


@pytest.mark.parametrize("row", TABLE, ids=ids)
def test_before_a_stream(row: tuple[Exception, int, str | None, str, str, str]) -> None:
    error, status, *_ = row
    assert status_of(error) == status
    for shape, body in bodies(row).items():
        response = error_response(error, shape=shape)
        assert (response.status_code, json.loads(bytes(response.body))) == (status, body)
        assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("row", TABLE, ids=ids)
def test_in_a_stream(row: tuple[Exception, int, str | None, str, str, str]) -> None:
    async def frames() -> Any:
        yield {"said": 1}
        raise row[0]

    async def sent(shape: Shape) -> bytes:
        parts: list[bytes] = []

        async def receive() -> Any:
            await asyncio.Future()

        async def send(message: Any) -> None:
            parts.append(message.get("body", b""))

        await EventStream(frames(), close=lambda: None, keep_alive_s=9, shape=shape)({}, receive, send)
        return b"".join(parts)

    for shape, body in bodies(row).items():
        first, second, rest = asyncio.run(sent(shape)).split(b"\n\n")
        assert first == b'data: {"said":1}'
        named, _, data = second.rpartition(b"data: ")
        assert named == (b"event: error\n" if shape == "anthropic" else b"")
        assert json.loads(data) == body
        assert rest == b""


def test_a_route_says_whose_shape_it_is() -> None:
    shapes: dict[str, Shape] = {
        "/v1/chat/completions": "openai",
        "/v1/completions": "openai",
        "/completion": "llama",
        "/completions": "openai",
        "/props": "llama",
        "/v1/messages": "anthropic",
        "/v1/messages/count_tokens": "anthropic",
        "/v1/messages2": "openai",
        "/": "openai",
    }
    assert {path: shape_of(path) for path in shapes} == shapes


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def server(tiny: Path, gate: Gate) -> Iterator[Live]:
    script: list[int | Exception] = [*tokens_of("abc"), RuntimeError("broken")]
    sampler = ScriptedSampler({1: script, 2: [RuntimeError("broken")]})
    with live(
        tiny,
        open_engine=lambda config: WatchedEngine(config, sampler=sampler, gate=gate),
        parallel=1,
        max_queue_depth=0,
    ) as server:
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with server.client() as http:
        yield openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)


ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def texts(stream: Any) -> Iterator[str]:
    return (chunk.choices[0].delta.content or "" for chunk in stream)


def test_the_official_client_hears_of_a_failure_in_its_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(**ASKED, seed=2)
    assert (failed.value.status_code, failed.value.code) == (500, "step_failed")
    said: list[str] = []
    with pytest.raises(openai.APIError) as broken:
        said.extend(texts(client.chat.completions.create(**ASKED, seed=1, stream=True)))
    assert "".join(said) == "abc"
    assert (broken.value.code, broken.value.type) == ("step_failed", "server_error")


def test_the_official_client_hears_of_a_full_queue_and_of_a_cancel(
    server: Live, client: openai.OpenAI, gate: Gate
) -> None:
    gate.shut()
    try:
        stream = client.chat.completions.create(
            **ASKED, seed=1, stream=True, extra_headers={"x-request-id": "mine"}
        )
        next(stream)
        with pytest.raises(openai.InternalServerError) as busy:
            client.chat.completions.create(**ASKED)
        assert (busy.value.status_code, busy.value.code) == (503, "queue_full")
        with server.client() as other:
            assert other.post("/v1/requests/mine/cancel").status_code == 200
        with pytest.raises(openai.APIError) as cancelled:
            list(stream)
        assert cancelled.value.code == "request_cancelled"
    finally:
        gate.open()


def test_the_official_client_hears_of_a_timeout(tiny: Path) -> None:
    gate = Gate()
    gate.shut()
    with (
        live(
            tiny, open_engine=lambda config: WatchedEngine(config, gate=gate), server={"request_timeout": 0.1}
        ) as server,
        server.client() as http,
    ):
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)
        with pytest.raises(openai.InternalServerError) as late:
            client.chat.completions.create(**ASKED)
        assert (late.value.status_code, late.value.code) == (504, "request_timeout")
        gate.open()


def test_what_is_not_supported_is_not_asked_for_again() -> None:
    """The official clients try again after any other answer of 500 and more."""
    assert error_response(NotSupported("m")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(QueueFull("m")).headers
