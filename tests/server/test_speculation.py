"""Several tokens a step as clients see them: the same answers in every shape, and what is told of the drafts."""

import asyncio
import json

import pytest

from engine.engine import Engine
from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

SAID = "one two three, " * 8
BODY = {"prompt": "one two three, one", "max_tokens": 100, "temperature": 0, "seed": 1}
CHATTED = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 60, "temperature": 0, "seed": 1}
LOOKUP = {"draft_kind": "prompt-lookup", "portable": True}


def scripted() -> ScriptedSampler:
    """Goes round in circles, which prompt lookup finds out."""
    return ScriptedSampler({1: tokens_of(SAID)}, choices=4)


def always_paying(monkeypatch) -> None:
    """Every round is worth its time, whatever this machine measures."""
    monkeypatch.setattr("engine.speculate.governor.Costs.of", lambda self, num_tokens: 1.0)
    monkeypatch.setattr("engine.speculate.governor.Costs.is_known", True)


async def test_answers_and_streams_are_those_of_plain_steps(tiny, monkeypatch):
    always_paying(monkeypatch)
    shapes = [
        (COMPLETIONS, BODY),
        (COMPLETIONS, BODY | {"stop": "two three, on", "echo": True}),
        (COMPLETIONS, BODY | {"logprobs": 2, "max_tokens": 41}),
        (COMPLETIONS, BODY | {"n": 2}),
        (CHAT, CHATTED),
    ]
    answers = []
    for config in ({"portable": True}, LOOKUP):
        async with served(tiny, sampler=scripted(), **config) as service:
            told = []
            for path, body in shapes:
                whole = await service.answer(path, body)
                stream = await service.stream(path, body)
                told.append((whole["choices"], stream.text()))
            answers.append(told)
            drafted = whole["timings"].get("draft_rounds")
    assert answers[0] == answers[1]
    assert drafted > 0


async def test_what_is_told(tiny, monkeypatch):
    always_paying(monkeypatch)
    async with served(tiny, sampler=scripted(), **LOOKUP) as service:
        answer = await service.answer(COMPLETIONS, BODY)
        timings = answer["timings"]
        assert timings["draft_kind"] == "prompt-lookup"
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"] <= 7 * timings["draft_rounds"]
        assert answer["usage"]["completion_tokens"] == 100
        assert timings["draft_rounds"] < 100 - timings["draft_n_accepted"] + 1
        mean = timings["draft_n_accepted"] / timings["draft_rounds"]
        assert timings["draft_mean_accepted"] == pytest.approx(mean, abs=0.001)
        assert timings["draft_pauses"] == 0
        text = (await service.client.get("/metrics")).text
        for name, key in (("rounds", "draft_rounds"), ("tokens", "draft_n"), ("accepted", "draft_n_accepted")):
            assert f"mlxcel_draft_{name}_total {float(timings[key])}\n" in text
        assert all(slot["speculative"] for slot in (await service.client.get("/slots")).json())
        policy = (await service.client.get("/v1/internal/draft-policy")).json()
        assert policy["kind"] == "prompt-lookup"
        assert policy["stats"]["rounds"] == timings["draft_rounds"]
        for verdict in policy["verdicts"]:
            assert [width["width"] for width in verdict["widths"]] == list(range(1, 8))


async def test_nothing_is_told_where_nobody_drafts(tiny):
    async with served(tiny) as service:
        answer = await service.answer(COMPLETIONS, BODY | {"max_tokens": 3})
        assert not [name for name in answer["timings"] if name.startswith("draft")]
        assert (await service.client.get("/v1/internal/draft-policy")).json() == {"kind": "none"}


async def test_rows_that_cannot_draft_are_answered(tiny, monkeypatch):
    """Beside one that does."""
    always_paying(monkeypatch)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    held = {
        "messages": [{"role": "user", "content": "JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "max_tokens": 60,
    }
    async with served(tiny, **LOOKUP) as service:
        free, answer = await asyncio.gather(
            service.answer(COMPLETIONS, BODY | {"ignore_eos": True}), service.answer(CHAT, held)
        )
        assert free["usage"]["completion_tokens"] == 100
        assert answer["timings"]["draft_rounds"] == 0
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length" or "a" in json.loads(choice["message"]["content"])


async def test_a_client_that_leaves_frees_a_row_that_drafts(tiny, monkeypatch):
    always_paying(monkeypatch)
    async with served(tiny, sampler=ScriptedSampler({1: tokens_of(SAID * 20)}), **LOOKUP) as service:
        async with service.client.stream(
            "POST", COMPLETIONS, json=BODY | {"max_tokens": 1000, "stream": True}
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
        assert (await service.answer(COMPLETIONS, BODY))["usage"]["completion_tokens"] == 100


async def test_a_draft_model(tiny, tmp_path, monkeypatch):
    """Another model of the same tokenizer; four streams at once."""
    always_paying(monkeypatch)
    other = write_checkpoint(tmp_path / "other", "llama")
    bodies = [BODY | {"temperature": 0.5, "seed": seed, "ignore_eos": True, "max_tokens": 40} for seed in range(4)]

    def opened(config):
        return Engine.open(config)

    texts = []
    for config in ({}, {"draft_model": other}):
        async with served(tiny, open_engine=opened, portable=True, **config) as service:
            answers = await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in bodies))
            texts.append([answer["choices"][0]["text"] for answer in answers])
    assert texts[0] == texts[1]
    assert sum(answer["timings"]["draft_rounds"] for answer in answers) > 0
