"""Logprobs in OpenAI's shapes: of the text they came with, streamed as folded, in any company."""

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from engine.direct import DirectEngine
from tests.engines import Watched
from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, Stream, live, served, tokens_of

pytestmark = pytest.mark.anyio

CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
RAW: dict[str, Any] = {"prompt": "once upon", "max_tokens": 9, "temperature": 0}
WANTED = {CHAT: {"logprobs": True, "top_logprobs": 3}, COMPLETIONS: {"logprobs": 3}}
BODIES = {CHAT: CHAT_BODY, COMPLETIONS: RAW}
SCRIPT = "né €: stop, and on"


def joined(path: str, bodies: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The logprobs of several chunks, as those of a whole answer."""
    bodies = [body for body in bodies if body is not None]
    names = ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    whole = {name: [entry for body in bodies for entry in body[name]] for name in names}
    return whole | ({"refusal": None} if path == CHAT else {})


def folded(path: str, stream: Stream, choice: int = 0) -> dict[str, Any]:
    return joined(path, [entry["logprobs"] for entry in stream.entries(choice)])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_stream_folds_to_the_answer(tiny: Path, path: str) -> None:
    asked = BODIES[path] | WANTED[path]
    async with served(tiny) as service:
        for more in ({}, {"n": 2, "temperature": 1.0, "seed": 4}, {"stop": ["e", "a"]}, {"max_tokens": 40}):
            whole = await service.answer(path, asked | more)
            stream = await service.stream(path, asked | more)
            for choice in whole["choices"]:
                assert choice["logprobs"] == folded(path, stream, choice["index"])
            for entry in stream.entries():
                assert entry["logprobs"] is None or any(entry["logprobs"].values())


@pytest.mark.parametrize("stop", [[], [": stop"], ["€"], ["top, a", "never"], ["on"], ["n"]], ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_tokens_are_told_with_their_text(tiny: Path, path: str, stop: list[str]) -> None:
    """Each chunk's tokens spell its text; what a stop string cuts off is told of nowhere."""
    script = ScriptedSampler({7: tokens_of(SCRIPT)})
    async with served(tiny, sampler=script) as service:
        asked = BODIES[path] | WANTED[path] | {"seed": 7, "stop": stop, "max_tokens": 60}
        stream = await service.stream(path, asked)
        [choice] = (await service.answer(path, asked))["choices"]
    expected = min([SCRIPT.split(one)[0] for one in stop] or [SCRIPT], key=len)
    assert stream.text() == expected
    assert choice["logprobs"] == folded(path, stream)
    for entry, text in zip(stream.entries(), stream.deltas(), strict=True):
        if path == CHAT:
            told = (entry["logprobs"] or {"content": []})["content"]
            assert b"".join(bytes(one["bytes"]) for one in told).decode() == text
        elif entry["logprobs"] is not None:
            assert len(entry["logprobs"]["tokens"]) == len(text.encode())
    if path == COMPLETIONS:
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [i for i, letter in enumerate(expected) for _ in letter.encode()]


async def test_tokens_that_are_no_characters_are_written_by_their_bytes(tiny: Path) -> None:
    script = ScriptedSampler({7: tokens_of("é")})
    async with served(tiny, sampler=script) as service:
        [chat] = (await service.answer(CHAT, CHAT_BODY | {"seed": 7, "logprobs": True}))["choices"]
        [raw] = (await service.answer(COMPLETIONS, RAW | {"seed": 7, "logprobs": 0}))["choices"]
    assert [(one["token"], one["bytes"]) for one in chat["logprobs"]["content"]] == [
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
    ]
    assert all(one["top_logprobs"] == [] for one in chat["logprobs"]["content"])
    assert raw["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [list(top) for top in raw["logprobs"]["top_logprobs"]] == [["bytes:\\xc3"], ["bytes:\\xa9"]]


async def test_they_are_the_models_own(tiny: Path) -> None:
    """Against a softmax in float64 of what the model gave, for greedy, drawn and biased rows together."""
    watched = Watched(tiny)
    seen: list[np.ndarray[Any, Any]] = []
    engine_sample = watched.engine._sample

    def keep(logits: mx.array, draws: Any) -> mx.array:
        seen.append(np.array(logits, np.float64)[0])
        return engine_sample(logits, draws)

    watched.engine._sample = keep
    for sampling in ({}, {"temperature": 1.3, "top_k": 9}, {"logit_bias": ((7, 100.0),)}):
        seen.clear()
        request = dataclasses.replace(watched.request("r", 12, 6, seed=5, **sampling), top_logprobs=5)
        told = [one for output in DirectEngine(watched.engine).complete(request) for one in output.logprobs]
        assert len(told) == len(seen) == 6
        for one, logits in zip(told, seen, strict=True):
            expected = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
            assert math.isclose(one.logprob, expected[one.token], abs_tol=1e-4)
            assert [token for token, _ in one.top] == np.argsort(-expected)[:5].tolist()


@pytest.mark.parametrize(
    "options", [{"no_batch": True}, {"parallel": 8}, {"parallel": 8, "lookahead": True}], ids=str
)
async def test_company_and_lanes_change_nothing(tiny: Path, options: dict[str, Any]) -> None:
    asked = [RAW | {"prompt": f"text {i}", "logprobs": i, "temperature": i % 2, "seed": i} for i in range(6)]
    asked += [RAW, RAW | {"temperature": 1.0, "mirostat": 2, "logprobs": 2, "seed": 1}]
    async with served(tiny, no_batch=True) as service:
        alone = [(await service.answer(COMPLETIONS, body))["choices"] for body in asked]
    async with served(tiny, **options) as service:
        together = await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in asked))
    for one, other in zip(alone, together, strict=True):
        [first], [second] = one, other["choices"]
        assert first["text"] == second["text"]
        if first["logprobs"] is None:
            assert second["logprobs"] is None
            continue
        assert np.allclose(first["logprobs"]["token_logprobs"], second["logprobs"]["token_logprobs"], atol=1e-4)
        assert [list(top) for top in first["logprobs"]["top_logprobs"]] == [
            list(top) for top in second["logprobs"]["top_logprobs"]
        ]


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1, "top_logprobs": 2}, "top_logprobs"),
    ],
    ids=str,
)
async def test_what_cannot_act_is_refused_by_name(
    tiny: Path, path: str, asked: dict[str, Any], param: str
) -> None:
    async with served(tiny) as service:
        refused = await service.post(path, BODIES[path] | asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_official_client_parses_them(tiny: Path) -> None:
    with live(tiny) as server, server.client() as http:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)
        asked: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": CHAT_BODY["messages"]}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        type(whole).model_validate(whole.model_dump(), strict=True)
        assert whole.choices[0].logprobs is not None
        content = whole.choices[0].logprobs.content
        assert content is not None
        told = []
        for chunk in client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True):
            type(chunk).model_validate(chunk.model_dump(), strict=True)
            told += [one for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content or ()]
        assert [one.model_dump() for one in told] == [one.model_dump() for one in content]
        response: Any = {
            "model": "tiny",
            "input": "hi",
            "max_output_tokens": 6,
            "temperature": 0,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        }
        answer = client.responses.create(**response)
        type(answer).model_validate(answer.model_dump(), strict=True)
        *_, item = answer.output
        assert item.type == "message"
        assert item.content[0].type == "output_text"
        tokens = [(one.token, one.logprob) for one in item.content[0].logprobs or ()]
        assert tokens == [(one.token, one.logprob) for one in content]
        told = []
        for event in client.responses.create(**response, stream=True):
            type(event).model_validate(event.model_dump(), strict=True)
            if event.type == "response.output_text.delta":
                assert not any(one.model_extra for one in event.logprobs)
                told += [(one.token, one.logprob) for one in event.logprobs]
        assert told == tokens
        raw = client.completions.create(model="tiny", prompt="once", max_tokens=4, logprobs=2)
        type(raw).model_validate(raw.model_dump(), strict=True)
        assert raw.choices[0].logprobs is not None
        assert len(raw.choices[0].logprobs.tokens or ()) > 0
