"""Streams and whole answers of the app: one is the fold of the other, and silence is broken on the way."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, PATIENCE_S, ScriptedSampler, Stream, frames, served, tokens_of

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 12},
    {"temperature": 1, "seed": 3, "max_tokens": 12, "n": 3},
    {"temperature": 1, "seed": 4, "max_tokens": 30, "stop": ["\n", "a"], "n": 2},
]


def folded(stream: Stream, num_choices: int) -> list[tuple[str, str]]:
    return [(stream.text(choice), *stream.reasons(choice)) for choice in range(num_choices)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", BODIES)
async def test_the_whole_is_the_fold_of_the_stream(tiny: Path, path: str, variant: dict[str, Any]) -> None:
    body = BODIES[path] | variant
    async with served(tiny, no_prompt_cache=True) as service:
        whole = await service.answer(path, body)
        stream = await service.stream(path, body | {"stream_options": {"include_usage": True}})
    choices = [(c.get("text", c.get("message", {}).get("content")), c["finish_reason"]) for c in whole["choices"]]
    assert folded(stream, variant.get("n", 1)) == choices
    assert [choice["index"] for choice in whole["choices"]] == list(range(variant.get("n", 1)))
    assert stream.done
    *_, last = stream.chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert {chunk["id"] for chunk in stream.chunks} == {stream.headers["x-request-id"]}
    assert {chunk["object"] for chunk in stream.chunks} == {
        "chat.completion.chunk" if path == CHAT else "text_completion"
    }


async def test_no_usage_where_none_was_asked_for(tiny: Path) -> None:
    async with served(tiny) as service:
        for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
            stream = await service.stream(CHAT, BODIES[CHAT] | {"max_tokens": 3} | options)
            assert all("usage" not in chunk and chunk["choices"] for chunk in stream.chunks)


async def test_usage_counts_every_token_once(tiny: Path) -> None:
    sampler = ScriptedSampler({1: tokens_of("abc")}, choices=2)
    async with served(tiny, sampler=sampler) as service:
        answered = await service.answer(COMPLETIONS, {"prompt": [[1, 2], [3, 4, 5]], "n": 2, "seed": 1})
        assert answered["usage"]["prompt_tokens"] == 5
        assert answered["usage"]["completion_tokens"] == 4 * 4
        assert [choice["text"] for choice in answered["choices"]] == ["abc"] * 4
        timings = answered["timings"]
        assert timings["predicted_n"] == 16
        assert timings["predicted_ms"] > 0


async def test_the_role_comes_first_and_once(tiny: Path) -> None:
    async with served(tiny) as service:
        stream = await service.stream(CHAT, BODIES[CHAT] | {"max_tokens": 5, "n": 2})
        for choice in range(2):
            first, *rest = stream.entries(choice)
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in entry["delta"] for entry in rest)


async def test_a_request_id_is_echoed_or_made(tiny: Path) -> None:
    async with served(tiny) as service:
        body = BODIES[CHAT] | {"max_tokens": 1}
        named = await service.post(CHAT, body, headers={"x-request-id": "my-own:1"})
        assert named.headers["x-request-id"] == named.json()["id"] == "my-own:1"
        for given in ({}, {"x-request-id": "no good\t"}, {"x-request-id": "x" * 200}):
            made = await service.post(CHAT, body, headers=given)
            assert made.json()["id"] == made.headers["x-request-id"]
            assert made.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path", BODIES)
async def test_headers_and_comments_come_before_the_first_token(tiny: Path, path: str) -> None:
    async with served(tiny, keep_alive_s=0.02) as service:
        service.gate.shut()
        body = BODIES[path] | {"stream": True, "max_tokens": 1}
        async with service.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            seen, comments = frames(response), 0
            while comments < 3:
                comments += await asyncio.wait_for(anext(seen), PATIENCE_S) == ": keep-alive"
            service.gate.open()
            rest = [frame async for frame in seen]
        assert rest[-1] == "data: [DONE]"


async def test_prefill_progress_is_told(tiny: Path) -> None:
    async with served(tiny, prefill_chunk_size=16) as service:
        stream = await service.stream(COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 1})
        assert stream.comments == ["prefill 16/40", "prefill 32/40", "prefill 40/40"]


async def test_requests_at_once_answer_as_alone(tiny: Path) -> None:
    bodies = [{"prompt": f"{i} says", "max_tokens": 5 + i, "temperature": 0} for i in range(12)]
    async with served(tiny, parallel=4) as service:
        alone = [(await service.answer(COMPLETIONS, body))["choices"] for body in bodies]
        streams = [service.stream(COMPLETIONS, body) for body in bodies]
        wholes = [service.answer(COMPLETIONS, body) for body in bodies]
        together = await asyncio.gather(*streams, *wholes)
        for choices, stream, whole in zip(alone, together[:12], together[12:], strict=True):
            assert whole["choices"] == choices
            assert (stream.text(), *stream.reasons()) == (choices[0]["text"], choices[0]["finish_reason"])


async def test_a_client_that_leaves_while_it_uploads(tiny: Path) -> None:
    async with served(tiny) as service:
        sent: list[Any] = []
        parts = [{"type": "http.request", "body": b'{"messages"', "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
        await service.app(scope, receive, send)
        assert all(message.get("status", 499) == 499 for message in sent)
        await service.answer(CHAT, BODIES[CHAT] | {"max_tokens": 1})


async def test_a_consumer_that_throws_ends_its_own_row(tiny: Path) -> None:
    async with served(tiny) as service:
        alone = await service.answer(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 20, "temperature": 0})
        bridge = service.app.state.service.models.default.bridge
        events: list[Any] = []

        def throwing(requests: Any) -> Any:
            del bridge.submit
            submitted = bridge.submit(requests)
            events.append(submitted)
            submitted._queue.put_nowait = None
            return submitted

        service.gate.shut()
        bridge.submit = throwing
        lost = asyncio.ensure_future(service.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 500}))
        await service.submitted(1)
        good = asyncio.ensure_future(
            service.answer(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 20, "temperature": 0})
        )
        await service.submitted(2)
        service.gate.open()
        assert (await good)["choices"] == alone["choices"]
        lost.cancel()
        await asyncio.wait([lost])


async def test_frames_are_json_of_one_line_each(tiny: Path) -> None:
    script = tokens_of('a\r\n\n"data: [DONE]"\u2028\\')
    async with served(tiny, sampler=ScriptedSampler({1: script})) as service:
        stream = await service.stream(COMPLETIONS, {"prompt": "hi", "seed": 1})
        assert stream.text() == 'a\r\n\n"data: [DONE]"\u2028\\'
        assert json.loads(json.dumps(stream.chunks)) == stream.chunks


async def test_the_user_of_a_request_is_logged(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tiny) as service:
        with caplog.at_level("INFO"):
            await service.answer(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "someone"})
    [fields] = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert fields["user"] == "someone"
