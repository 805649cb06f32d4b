"""Bodies to typed requests: what acts, what is refused by name, and what null means."""

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.request import Sampling
from server.bodies import CompletionBody
from server.chat import ChatBody
from server.errors import NotSupported
from server.validate import MEANINGLESS, parse

NEUTRAL = CompletionBody.NEUTRAL
HI = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatBody:
    body = parse(json.dumps(HI | fields).encode(), ChatBody)
    body.check()
    return body


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "hi"} | fields).encode(), CompletionBody)


def test_fields_that_always_come_and_mean_nothing() -> None:
    for name in MEANINGLESS:
        for value in ("x", 1, {"a": [1]}, None):
            assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_does_not_act_takes_its_neutral_value_only(name: str) -> None:
    for neutral in (*NEUTRAL[name], None):
        assert completion(**{name: neutral}) == completion()
    for value in (3, "text", {"a": 1}, [1], True, False, 0, 1, 0.5):
        neutral = any(json.dumps(value) == json.dumps(accepted) for accepted in NEUTRAL[name])
        if neutral:
            continue
        with pytest.raises(RequestError) as refused:
            completion(**{name: value})
        assert refused.value.param == name
        assert name in str(refused.value)


def test_numbers_may_be_written_either_way() -> None:
    assert completion(top_logprobs=0.0, temperature=1) == completion(temperature=1.0)


def test_sampling_is_what_was_asked_over_the_default() -> None:
    default = Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3)
    assert completion().sampling(default) == default
    assert completion(temperature=None, top_k=None).sampling(default) == default
    asked = completion(temperature=0, top_k=0, top_p=0, min_p=0, seed=0).sampling(default)
    assert asked == Sampling(temperature=0.0, top_k=0, top_p=0.0, min_p=0.0, seed=0)
    assert completion(top_k=-1).sampling(default).top_k == 0
    assert completion(seed=-1).sampling(default).seed is None


def test_bounds_have_two_names() -> None:
    assert chat().bound() is None
    assert chat(max_tokens=3).bound() == chat(max_completion_tokens=3).bound() == 3
    assert chat(max_tokens=3, max_completion_tokens=3).bound() == 3
    with pytest.raises(RequestError, match="differ"):
        chat(max_tokens=3, max_completion_tokens=4)


def test_stops() -> None:
    assert completion().stops() == ()
    assert completion(stop="a").stops() == ("a",)
    assert completion(stop=["a", "b"]).stops() == ("a", "b")
    assert completion(stop=[]).stops() == ()
    for empty in ("", ["a", ""]):
        with pytest.raises(RequestError, match="empty"):
            completion(stop=empty).stops()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab"], ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", ["b"]], [True], [1.5], {"a": 1}, 7])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        completion(prompt=prompt).prompts()
    assert refused.value.param.startswith("prompt")


def test_a_message_may_hold_more_than_its_shape() -> None:
    message = {"role": "assistant", "content": "x", "name": "a", "reasoning_content": "b"}
    assert chat(messages=[message]).messages == [message]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", None])
def test_parts_that_are_no_text(kind: str | None) -> None:
    text = {"type": "text", "text": "look"}
    with pytest.raises(NotSupported, match=r"messages\[0\].content\[1\]") as refused:
        chat(messages=[{"role": "user", "content": [text, {"type": kind}]}])
    assert refused.value.param == "messages[0]"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'{"prompt": "a", "max_tokens": 1e999}', "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b"[]", "object"),
        (b'{"prompt": "a", "min_p": ' + b"[" * 5000, "nested too deeply"),
    ],
)
def test_bodies_that_are_none(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse(data, CompletionBody)
