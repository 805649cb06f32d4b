"""llama-server's `/completion`: its shapes whole and streamed, and its fields, which act or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.llama import NativeCompletionBody
from tests.serving import COMPLETIONS, ScriptedSampler, Served, live, served, tokens_of
from tests.tiny import END_OF_TURN

pytestmark = pytest.mark.anyio

PATH = "/completion"
BODY: dict[str, Any] = {"prompt": "hi", "seed": 1}


async def streamed(service: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await service.post(PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame for frame in response.text.split("\n\n") if frame.startswith("data: ")]
    assert "[DONE]" not in response.text
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def script(text: str) -> ScriptedSampler:
    return ScriptedSampler({1: tokens_of(text)}, choices=3)


ENDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "end of sequence": ("one\ntwo", {}, {"content": "one\ntwo", "stop_type": "eos", "has_new_line": True}),
    "bound": ("one two", {"n_predict": 3}, {"content": "one", "stop_type": "limit", "tokens_predicted": 3}),
    "bound by its other name": ("one two", {"max_tokens": 3}, {"content": "one", "stop_type": "limit"}),
    "no bound": ("one two", {"n_predict": -1}, {"content": "one two", "stop_type": "eos"}),
    "stop string": (
        "one two",
        {"stop": ["x", " t", "two"]},
        {"content": "one", "stop_type": "word", "stopping_word": " t"},
    ),
    "context": ("y" * 99, {"prompt": "x" * 60}, {"stop_type": "limit", "truncated": True, "tokens_predicted": 4}),
}


@pytest.mark.parametrize("name", ENDS)
async def test_how_an_answer_ends(tiny: Path, name: str) -> None:
    text, more, expected = ENDS[name]
    async with served(tiny, sampler=script(text), ctx_size=64) as service:
        whole = await service.answer(PATH, BODY | more | {"cache_prompt": False})
        default = {
            "truncated": False,
            "stopping_word": "",
            "stop": True,
            "index": 0,
            "id_slot": -1,
            "model": "tiny",
        }
        assert whole.items() >= (default | expected).items()
        assert whole["tokens"] == []
        assert whole["prompt"] == (BODY | more)["prompt"]
        frames = await streamed(service, BODY | more | {"cache_prompt": False})
        assert "".join(frame["content"] for frame in frames) == whole["content"]
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        last = frames[-1] | {"content": whole["content"], "tokens": []}
        for one in (last, whole):
            one.pop("timings")
            one["generation_settings"].pop("stream")
        assert last == whole


async def test_tokens_are_told_where_they_are_asked_for(tiny: Path) -> None:
    async with served(tiny, sampler=script("aé")) as service:
        ids = [*tokens_of("aé"), END_OF_TURN]
        assert (await service.answer(PATH, BODY | {"return_tokens": True}))["tokens"] == ids
        frames = await streamed(service, BODY)
        assert [token for frame in frames for token in frame["tokens"]] == ids
        assert [frame["tokens_predicted"] for frame in frames] == [1, 3, 4]


@pytest.mark.parametrize("stop", [[], ["€"], ["wo"]], ids=str)
async def test_probabilities_are_told_with_their_text(tiny: Path, stop: list[str]) -> None:
    text = "one é € two"
    async with served(tiny, sampler=script(text)) as service:
        body = BODY | {"n_probs": 3, "stop": stop}
        whole = await service.answer(PATH, body)
        frames = await streamed(service, body)
        raw = await service.answer(COMPLETIONS, BODY | {"logprobs": 3, "stop": stop})
        none = await service.answer(PATH, BODY | {"n_probs": 0})
        refused = await service.post(PATH, BODY | {"n_probs": 21})
    told = whole["completion_probabilities"]
    assert whole["generation_settings"]["n_probs"] == 3
    assert [one["id"] for one in told] == tokens_of(whole["content"])
    for one in told:
        assert one.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert [top.keys() for top in one["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 3
        assert one["logprob"] <= 0
    assert [one["logprob"] for one in told] == raw["choices"][0]["logprobs"]["token_logprobs"]
    assert [one for frame in frames for one in frame.get("completion_probabilities", ())] == told
    for frame in frames[:-1]:
        spelled = b"".join(bytes(one["bytes"]) for one in frame["completion_probabilities"])
        assert spelled.decode() == frame["content"]
    assert "completion_probabilities" not in none
    assert "<= 20" in refused.json()["error"]["message"]


async def test_counts_and_timings(tiny: Path) -> None:
    async with served(tiny) as service:
        body = {"prompt": list(range(40)), "n_predict": 4, "temperature": 0}
        for cached in (0, 32):
            whole = await service.answer(PATH, body)
            assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (40, 4)
            assert whole["tokens_cached"] == whole["timings"]["cache_n"] == cached
            assert whole["timings"]["prompt_n"] == 40 - cached
            assert whole["timings"]["predicted_per_token_ms"] > 0
        uncached = await service.answer(PATH, body | {"cache_prompt": False})
        assert uncached["tokens_cached"] == 0


async def test_settings_are_told_as_they_were_taken(tiny: Path) -> None:
    asked = {"temperature": 0.5, "top_k": 3, "repeat_penalty": 1.5, "n_predict": 2, "seed": 7, "ignore_eos": True}
    async with served(tiny) as service:
        settings = (await service.answer(PATH, {"prompt": "a", "stop": "b"} | asked))["generation_settings"]
        assert settings.items() >= asked.items()
        assert settings["stop"] == ["b"]
        unbounded = await service.answer(PATH, {"prompt": "a", "n_predict": -1, "stop": ["e", "a", "t"]})
        assert unbounded["generation_settings"]["n_predict"] == -1


PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "a text": ("ab", ["ab"]),
    "ids": ([1, 2], ["\x01\x02"]),
    "texts and ids": (["a", *tokens_of("bc"), "d"], ["abcd"]),
    "ids and texts": ([*tokens_of("a"), "bc"], ["abc"]),
    "texts": (["a", "b"], ["a", "b"]),
    "sequences": (["a", tokens_of("bc"), [*tokens_of("d"), "e"]], ["a", "bc", "de"]),
    "an object": ({"prompt_string": "ab"}, ["ab"]),
    "objects": ([{"prompt_string": "ab"}, "c"], ["ab", "c"]),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_every_form_of_prompt(tiny: Path, name: str) -> None:
    prompt, texts = PROMPTS[name]
    async with served(tiny) as service:
        if name == "ids":
            texts = [service.engine.language.tokens.decode(prompt)]
        whole = await service.answer(PATH, {"prompt": prompt, "n_predict": 2, "temperature": 0})
        answers = [whole] if len(texts) == 1 else whole
        assert isinstance(answers, list)
        assert [one["prompt"] for one in answers] == texts
        assert [one["index"] for one in answers] == list(range(len(texts)))
        for text, one in zip(texts, answers, strict=True):
            alone = await service.answer(COMPLETIONS, {"prompt": text, "max_tokens": 2, "temperature": 0})
            assert one["content"] == alone["choices"][0]["text"]


async def test_several_answers(tiny: Path) -> None:
    async with served(tiny, sampler=script("abc")) as service:
        for asked in ({"n_cmpl": 3}, {"n": 3}):
            answers = await service.answer(PATH, BODY | asked)
            assert [one["content"] for one in answers] == ["abc"] * 3


async def test_a_bias(tiny: Path) -> None:
    async with served(tiny) as service:
        body = {"prompt": "a", "n_predict": 3, "temperature": 0, "return_tokens": True}
        for bias in ([[97, 100]], {"97": 100}):
            assert (await service.answer(PATH, body | {"logit_bias": bias}))["tokens"] == [97] * 3
        banned = [[97, 50], [98, 99], [98, False]]
        assert (await service.answer(PATH, body | {"logit_bias": banned}))["tokens"] == [97] * 3


async def test_parts_of_the_answer(tiny: Path) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing", "timings/nothing"]
    async with served(tiny, sampler=script("abc")) as service:
        body = BODY | {"response_fields": fields, "n_predict": 2}
        assert await service.answer(PATH, body) == {"content": "ab", "n_predict": 2}
        assert (await streamed(service, body))[-1] == {"content": "", "n_predict": 2}


REFUSED: dict[str, Any] = {
    "id_slot": 0,
    "n_probs": 21,
    "post_sampling_probs": True,
    "timings_per_token": True,
    "return_progress": True,
    "sse_ping_interval": 3,
    "n_keep": 5,
    "n_indent": 2,
    "t_max_predict_ms": 100,
    "samplers": ["temperature", "top_k"],
    "lora": [{"id": 0, "scale": 1}],
    "n_predict": 0,
    "n_cmpl": 17,
    "stream_options": {},
    "messages": [],
    "logit_bias": [["word", 1]],
    "temprature": 1,
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_does_not_act_is_refused_by_name(tiny: Path, name: str) -> None:
    async with served(tiny) as service:
        for stream in (True, False):
            response = await service.post(PATH, BODY | {"stream": stream, name: REFUSED[name]})
            error = response.json()["error"]
            assert response.status_code == error["code"] == 400
            assert error.keys() == {"code", "message", "type"}
            assert error["type"] == "invalid_request_error"
            assert name in error["message"]


async def test_what_asks_for_nothing_is_accepted(tiny: Path) -> None:
    neutral = {name: values[0] for name, values in NativeCompletionBody.NEUTRAL.items() if values}
    async with served(tiny, sampler=script("abc")) as service:
        assert (await service.answer(PATH, BODY | neutral))["content"] == "abc"
        assert (await service.answer(PATH, BODY | dict.fromkeys(REFUSED, None)))["content"] == "abc"


@pytest.mark.parametrize(
    "prompt", [[], "", [1, ["a"]], [[]], 5, [True], {"prompt_string": "a", "multimodal_data": []}]
)
async def test_prompts_that_are_none(tiny: Path, prompt: Any) -> None:
    async with served(tiny) as service:
        response = await service.post(PATH, BODY | {"prompt": prompt})
        assert response.status_code == 400
        assert "prompt" in response.json()["error"]["message"]


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_failure(tiny: Path, num_tokens: int) -> None:
    tokens: list[int | Exception] = [*tokens_of("abc")[:num_tokens], RuntimeError("broken")]
    async with served(tiny, sampler=ScriptedSampler({1: tokens})) as service:
        whole = await service.post(PATH, BODY)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, 500)
        frames = await streamed(service, BODY)
        assert len(frames) == num_tokens + 1
        assert frames[-1]["error"].items() >= {"code": 500, "type": "server_error"}.items()
        assert not any(frame.get("stop") for frame in frames)


@pytest.mark.real
def test_the_real_model_over_the_network(real_checkpoint: Path) -> None:
    with live(real_checkpoint, parallel=2, ctx_size=512) as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        prompt = client.post("/apply-template", json=chat).json()["prompt"]
        tokens = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": prompt}
        asked = {"n_predict": 24, "temperature": 0}
        by_text, by_ids = (client.post(PATH, json={"prompt": p, **asked}).json() for p in (prompt, tokens))
        assert "Paris" in by_text["content"]
        assert by_ids["content"] == by_text["content"]
        assert by_text["tokens_evaluated"] == len(tokens)


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        ({"json_schema": {"enum": ["yes", "no"]}}, {'"yes"', '"no"'}),
        ({"grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
    ],
)
async def test_an_answer_keeps_to_its_grammar(tiny: Path, more: dict[str, Any], texts: set[str]) -> None:
    async with served(tiny) as service:
        whole = (await service.post("/completion", {"prompt": "x", "n_predict": 30, **more})).json()
        assert whole["content"].strip() in texts
        assert whole["stop_type"] == "eos"
        free = await service.post("/completion", {"prompt": "x", "n_predict": 3, "grammar": ""})
        assert free.status_code == 200
        both = await service.post("/completion", {"prompt": "x", "json_schema": {}, "regex": "a"})
        assert (both.status_code, "json_schema" in both.json()["error"]["message"]) == (400, True)
