"""Every error's status, type, param and code, as clients meet them."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, MlxcelError, ModelIncomplete
from server.config import ServerConfig
from server.errors import error_body
from server.routes import common
from tests.serving import CHAT, COMPLETIONS, PATIENCE_S, ScriptedSampler, WatchedEngine, served, tokens_of
from tests.tiny import write_checkpoint, write_tokenizer

pytestmark = pytest.mark.anyio

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "https://nowhere.test/p.png"}}

# path, body, status, param, code, a part of the message
REFUSED: dict[str, tuple[str, Any, int, str | None, str | None, str]] = {
    "unknown field": (CHAT, HI | {"temprature": 1}, 400, "temprature", None, "did you mean 'temperature'?"),
    "field that nothing is like": (CHAT, HI | {"qqqqq": 1}, 400, "qqqqq", None, "unknown field 'qqqqq'"),
    "field that does not act": (CHAT, HI | {"modalities": ["audio"]}, 400, "modalities", None, 'only ["text"]'),
    "another dialect's field": (COMPLETIONS, {"prompt": "a"} | HI, 400, "messages", None, "unknown field"),
    "no messages": (CHAT, {}, 400, None, None, "messages"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages", None, "length"),
    "a message that is none": (CHAT, {"messages": ["hi"]}, 400, "messages[0]", None, "object"),
    "unknown role": (CHAT, {"messages": [{"role": "bot"}]}, 400, "messages[0].role", None, "'bot'"),
    "content of a wrong kind": (
        CHAT,
        {"messages": [*HI["messages"], {"role": "user", "content": 5}]},
        400,
        "messages[1].content",
        None,
        "int",
    ),
    "a part without text": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0]",
        None,
        "needs a text",
    ),
    "a picture": (
        CHAT,
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        501,
        "messages[0]",
        None,
        "image_url",
    ),
    "a tool that is none": (CHAT, HI | {"tools": [{"type": "x"}]}, 400, "tools[0].type", None, "'x'"),
    "two bounds": (CHAT, HI | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens", None, "differ"),
    "no tokens asked for": (CHAT, HI | {"max_tokens": 0}, 400, "max_tokens", None, ">= 1"),
    "temperature below zero": (CHAT, HI | {"temperature": -1}, 400, "temperature", None, ">= 0"),
    "top_p above one": (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, 400, "top_p", None, "<= 1"),
    "too many choices": (COMPLETIONS, {"prompt": "a", "n": 1000}, 400, "n", None, "<= 16"),
    "too many stops": (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop", None, "16"),
    "an empty stop": (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, 400, "stop", None, "empty"),
    "text in place of a number": (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", None, "int"),
    "a streamed extra": (
        COMPLETIONS,
        {"prompt": "a", "stream_options": {"include": 1}},
        400,
        "stream_options",
        None,
        "include",
    ),
    "no prompt": (COMPLETIONS, {}, 400, None, None, "prompt"),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt", None, "nothing to continue"),
    "no prompts": (COMPLETIONS, {"prompt": []}, 400, "prompt", None, "nothing to continue"),
    "mixed prompts": (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", None, "mixture"),
    "an id beyond the vocabulary": (COMPLETIONS, {"prompt": [1, 259]}, 400, "prompt", None, "259"),
    "an id below zero": (COMPLETIONS, {"prompt": [[1], [-1]]}, 400, "prompt", None, "-1"),
    "an enormous id": (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt", None, ""),
    "another model": (CHAT, HI | {"model": "gpt-4"}, 404, "model", "model_not_found", "served: tiny"),
    "a long chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 99}]},
        400,
        "messages",
        "context_length_exceeded",
        "holds 64",
    ),
    "a long prompt": (
        COMPLETIONS,
        {"prompt": "x" * 99},
        400,
        "prompt",
        "context_length_exceeded",
        "has 99 tokens and the context holds 64",
    ),
}


def check_error(body: Any, kind: str, param: str | None, code: str | None, part: str) -> None:
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, code), error
    assert part in error["message"], error


async def test_what_is_refused(tiny: Path) -> None:
    async with served(tiny, ctx_size=64) as service:
        for name, (path, body, status, param, code, part) in REFUSED.items():
            for streamed in (False, True):
                response = await service.post(path, body | {"stream": streamed})
                assert response.status_code == status, (name, response.text)
                assert response.headers["content-type"] == "application/json"
                kind = "not_supported_error" if status == 501 else "invalid_request_error"
                check_error(response.json(), kind, param, code, part)
        assert service.engine.rows == []
        await service.answer(CHAT, HI | {"max_tokens": 1})


@pytest.mark.parametrize("streamed", [False, True])
async def test_routes_that_are_none(tiny: Path, streamed: bool) -> None:
    async with served(tiny) as service:
        for method, path, status, code in (
            ("POST", "/v1/chat/completion", 404, "not_found"),
            ("GET", "/web/", 404, "not_found"),
            ("GET", CHAT, 405, None),
            ("DELETE", "/v1/models", 405, None),
            ("POST", "/health", 405, None),
        ):
            response = await service.client.request(method, path)
            assert response.status_code == status
            check_error(response.json(), "invalid_request_error", None, code, f"{method} {path}")
            assert (status == 405) == ("allow" in response.headers)


async def test_a_body_beyond_the_bound(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "MAX_BODY_BYTES", 1000)
    async with served(tiny) as service:
        for size in (1001, 5000):
            response = await service.client.post(CHAT, content=b" " * size)
            assert response.status_code == 413
            check_error(response.json(), "invalid_request_error", None, "body_too_large", "1000 bytes")
        body = json.dumps(HI | {"max_tokens": 1}).encode()
        assert (await service.client.post(CHAT, content=body.ljust(1000))).status_code == 200


async def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path, "llama"), template=None)
    async with served(tmp_path) as service:
        for streamed in (False, True):
            response = await service.post(CHAT, HI | {"stream": streamed})
            assert response.status_code == 400
            check_error(response.json(), "invalid_request_error", "messages", "no_chat_template", COMPLETIONS)
        await service.answer(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})


async def test_a_template_that_refuses(tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path, "llama"), template="{{ raise_exception('roles must alternate') }}")
    async with served(tmp_path) as service:
        response = await service.post(CHAT, HI | {"stream": True})
        assert response.status_code == 400
        check_error(response.json(), "invalid_request_error", "messages", None, "roles must alternate")


async def test_a_full_queue(tiny: Path) -> None:
    sampler = ScriptedSampler({1: tokens_of("abc")})
    body = {"prompt": "hi", "seed": 1}
    async with served(tiny, sampler=sampler, parallel=1, max_queue_depth=2) as service:
        service.gate.shut()
        accepted = [asyncio.ensure_future(service.answer(COMPLETIONS, body)) for _ in range(3)]
        await service.submitted(3)
        for refused in (body, body | {"stream": True}, body | {"n": 2}):
            response = await service.post(COMPLETIONS, refused)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            check_error(response.json(), "server_error", None, "queue_full", "max_queue_depth 2")
        service.gate.open()
        assert [(await answer)["choices"][0]["text"] for answer in accepted] == ["abc"] * 3
        assert (await service.stream(COMPLETIONS, body)).text() == "abc"


async def test_choices_are_enqueued_all_or_none(tiny: Path) -> None:
    async with served(tiny, parallel=1, max_queue_depth=2) as service:
        service.gate.shut()
        first = asyncio.ensure_future(service.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}))
        await service.submitted(1)
        await service.gate.engine_held()
        assert (await service.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})).status_code == 503
        service.gate.open()
        assert (await first).status_code == 200
        assert [row for row in service.engine.rows if service.engine.ran(row)] == service.engine.rows[:1]


async def test_more_sequences_than_ever_fit_are_the_requests_fault(tiny: Path) -> None:
    async with served(tiny, parallel=1, max_queue_depth=2) as service:
        answer = await service.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert "at most 3" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["chat_template", "messages", "tools", "tokenize", "add_generation_prompt"])
async def test_a_client_does_not_bring_its_own_template(tiny: Path, key: str) -> None:
    async with served(tiny) as service:
        body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {key: "{{ 1 }}"}}
        answer = await service.post(CHAT, body)
        assert answer.status_code == 400
        assert key in answer.json()["error"]["message"]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tiny: Path) -> None:
    async with served(tiny) as service:
        tokens = (await service.app.state.service.models.default.bridge.model()).tokens
        with patch.object(type(tokens), "at_least", lambda *_: 5000):
            answer = await service.post(COMPLETIONS, {"prompt": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "at least 5000 tokens" in error["message"]


async def test_texts_that_no_tokenizer_takes_are_the_requests_fault(tiny: Path) -> None:
    surrogate = {"messages": [{"role": "user", "content": "x", "name": "y"}]}
    async with served(tiny) as service:
        with patch("engine.text.template.ChatTemplate.render", lambda *_, **__: "\ud800"):
            assert (await service.post(CHAT, surrogate)).status_code == 400


async def test_nested_nulls_are_not_given(tiny: Path) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stream_options": {"include_usage": None}}
    async with served(tiny) as service:
        assert (await service.stream(COMPLETIONS, body)).done


async def test_errors_carry_the_requests_id(tiny: Path) -> None:
    async with served(tiny) as service:
        for path in (COMPLETIONS, "/nowhere"):
            answer = await service.post(path, {"nonsense": 1}, headers={"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
            assert (await service.post(path, {})).headers["x-request-id"]


async def test_while_the_model_loads_requests_wait(tiny: Path) -> None:
    loads = threading.Event()

    def open_engine(config: EngineConfig) -> WatchedEngine:
        assert loads.wait(PATIENCE_S)
        return WatchedEngine(config)

    async with served(tiny, open_engine=open_engine) as service:
        health = await service.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading model"})
        assert health.headers["retry-after"]
        [described] = (await service.client.get("/v1/models")).json()["data"]
        assert "max_model_len" not in described
        waiting = [asyncio.ensure_future(service.answer(CHAT, HI | {"max_tokens": 2})) for _ in range(3)]
        leaving = asyncio.ensure_future(service.post(CHAT, HI))
        assert (await service.post(CHAT, HI | {"model": "gpt-4"})).status_code == 404
        leaving.cancel()
        await asyncio.wait([leaving])
        await service.exchanges_ended(but=3)
        loads.set()
        assert len(await asyncio.gather(*waiting)) == 3
        assert (await service.client.get("/health")).status_code == 200


@pytest.mark.parametrize("error", [ModelIncomplete("half of it is missing"), KeyError("a fault of ours")])
async def test_a_model_that_cannot_be_loaded(tiny: Path, error: Exception) -> None:
    loads = threading.Event()
    faults: list[MlxcelError] = []

    def open_engine(config: EngineConfig) -> WatchedEngine:
        assert loads.wait(PATIENCE_S)
        raise error

    async with served(tiny, open_engine=open_engine, on_fault=faults.append) as service:
        waiting = [asyncio.ensure_future(service.post(path, HI)) for path in (CHAT, CHAT)]
        loads.set()
        said = str(error.args[0])
        for response in (*await asyncio.gather(*waiting), await service.client.get("/health")):
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert said in response.json()["error"]["message"]
        assert len(faults) == 1


async def test_a_fault_of_ours_tells_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tiny) as service:

        def broken(*arguments: Any, **options: Any) -> None:
            raise KeyError("a secret")

        monkeypatch.setattr(service.app.state.service.models.default.bridge, "submit", broken)
        response = await service.post(COMPLETIONS, {"prompt": "hi"})
        assert response.status_code == 500
        check_error(response.json(), "server_error", None, "internal_error", "the server's log")
        assert "secret" not in response.text
        monkeypatch.undo()
        await service.answer(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})


def test_hints_are_part_of_the_message() -> None:
    error = ConfigError("host", "this cannot be", hint="do that")
    assert error_body(error)["error"]["message"] == "this cannot be; do that"


def test_a_bind_beyond_loopback_without_keys_is_refused(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.test"):
        with pytest.raises(ConfigError, match="anybody on the network") as refused:
            ServerConfig(EngineConfig(model=tmp_path), "tiny", host=host)
        assert "--insecure-no-auth" in refused.value.hint
        ServerConfig(EngineConfig(model=tmp_path), "tiny", host=host, insecure_no_auth=True)
    for host in ("127.0.0.1", "::1", "localhost", "/run/x.sock"):
        ServerConfig(EngineConfig(model=tmp_path), "tiny", host=host)
