"""Tool calls through the chat route: shapes, both modes alike, what is refused, and what is given back as text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.replies import (
    ADD,
    BROKEN_CALL,
    CALL,
    HI,
    LONG,
    LONG_CALL,
    NO_BLANKS,
    OTHER,
    TOOLS,
    answered,
    called,
    script,
)
from tests.serving import CHAT, ScriptedSampler, served, tokens_of
from tests.templates import CODER, HARMONY, PLAIN, THINKING, THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio


async def test_a_call(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"I will add.\n{CALL}")) as service:
        choice = await answered(service, TOOLS)
    assert called(choice) == [("add", {"a": 2})]
    assert choice["message"]["content"] == "I will add."
    assert choice["finish_reason"] == "tool_calls"


async def test_the_name_comes_first_then_the_arguments(tmp_path: Path) -> None:
    long = {"a": "x" * 1000}
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': long})}</tool_call>"
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(text)) as service:
        stream = await service.stream(CHAT, TOOLS)
    deltas = [entry["delta"]["tool_calls"] for entry in stream.entries() if "tool_calls" in entry["delta"]]
    [first], *rest = deltas
    assert (first["index"], first["type"], first["function"]) == (0, "function", {"name": "add", "arguments": ""})
    assert len(rest) > 1
    assert all(call.keys() == {"index", "function"} for [call] in rest)
    assert json.loads("".join(call["function"]["arguments"] for [call] in rest)) == long


CHANNEL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(("template", "before"), [(PLAIN, CALL[: CALL.index('{"a"')]), (HARMONY, CHANNEL)])
async def test_arguments_come_before_the_call_ends(tmp_path: Path, template: str, before: str) -> None:
    """A step fails within them: what came by then is all that there ever is."""
    arguments = '{"a": "' + "x" * 100
    sampler = ScriptedSampler({0: [*tokens_of(before + arguments), ValueError("broken")]})
    async with served(checkpoint(tmp_path, template), sampler=sampler) as service:
        stream = await service.stream(CHAT, TOOLS)
    assert [error["code"] for error in stream.errors] == ["step_failed"]
    [first], *rest = [entry["delta"]["tool_calls"] for entry in stream.entries() if "tool_calls" in entry["delta"]]
    assert first["function"] == {"name": "add", "arguments": ""}
    told = "".join(call["function"]["arguments"] for [call] in rest)
    assert arguments.startswith(told)
    assert len(told) >= len(arguments) - 1, "a channel keeps one character back"
    assert len(rest) > 30


async def test_long_calls_one_after_the_other(tmp_path: Path) -> None:
    script_ = script(f"First.\n{LONG_CALL}\n{CALL}\n{LONG_CALL}")
    async with served(checkpoint(tmp_path, PLAIN), sampler=script_) as service:
        choice = await answered(service, TOOLS | {"logprobs": False})
        one = await answered(service, TOOLS | {"parallel_tool_calls": False})
    assert called(choice) == [("add", {"a": LONG}), ("add", {"a": 2}), ("add", {"a": LONG})]
    assert called(one) == [("add", {"a": LONG})]
    assert choice["message"]["content"] == one["message"]["content"] == "First."
    assert choice["finish_reason"] == one["finish_reason"] == "tool_calls"


async def test_one_whole_call_is_enough(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"{BROKEN_CALL}\n{CALL}")) as service:
        choice = await answered(service, TOOLS)
    broken, whole = choice["message"]["tool_calls"]
    assert broken["function"]["arguments"] == json.dumps({"a": LONG})[:-2] + "\\"
    assert whole["function"]["arguments"] == '{"a": 2}'
    assert choice["message"]["content"] == 'd"}}\n\n'
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": None}, {"parallel_tool_calls": True}])
async def test_several_calls(tmp_path: Path, more: dict[str, Any]) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"{CALL}\n{OTHER}\n{CALL}")) as service:
        choice = await answered(service, TOOLS | more)
    assert called(choice) == [("add", {"a": 2}), ("sub", {}), ("add", {"a": 2})]
    assert choice["message"]["content"] is None


async def test_one_call_where_more_are_not_wanted(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"{CALL}\n{OTHER}")) as service:
        choice = await answered(service, TOOLS | {"parallel_tool_calls": False})
    assert called(choice) == [("add", {"a": 2})]


async def test_choices_have_calls_of_their_own(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(CALL, choices=2)) as service:
        whole = await service.answer(CHAT, TOOLS | {"n": 2})
    assert [called(choice) for choice in whole["choices"]] == [[("add", {"a": 2})]] * 2


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_without_tools_there_is_no_call(tmp_path: Path, more: dict[str, Any]) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(CALL)) as service:
        choice = await answered(service, TOOLS | more)
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


BROKEN = {
    "no JSON": "<tool_call>add please</tool_call>",
    "an unknown tool": '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
    "arguments that are none": '<tool_call>{"name": "add", "arguments": [2]}</tool_call>',
    "with text around": 'So:\n\n<tool_call>\n{"name": "add"\n</tool_call>\n\n done ',
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_what_is_no_call_is_given_back_as_it_was(tmp_path: Path, kind: str) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(BROKEN[kind])) as service:
        choice = await answered(service, TOOLS)
    assert choice["message"] == {"role": "assistant", "content": BROKEN[kind]}
    assert choice["finish_reason"] == "stop"


async def test_a_template_without_tools_gets_them_in_words(tiny: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    async with served(checkpoint(tmp_path, template), sampler=script(CALL)) as service:
        choice = await answered(service, TOOLS)
        prompt = service.engine.language.tokens.decode(service.engine.rows[0].request.prompt)
    assert called(choice) == [("add", {"a": 2})]
    assert prompt.startswith("[system]You can call these functions:")


async def test_a_call_and_its_result_are_rendered(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(CALL, "It is 2.")) as service:
        first = (await service.answer(CHAT, TOOLS))["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        second = await service.answer(CHAT, TOOLS | {"messages": [*HI["messages"], first, result], "seed": 1})
        prompt = service.engine.language.tokens.decode(service.engine.rows[1].request.prompt)
    assert second["choices"][0]["message"]["content"] == "It is 2."
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n" in prompt


async def test_stop_strings_are_not_looked_for_in_calls_and_thoughts(tmp_path: Path) -> None:
    text = f"<think>add, they say</think>Now I add: \n{CALL}"
    async with served(checkpoint(tmp_path, THINKS_ITSELF), sampler=script(text)) as service:
        choice = await answered(service, TOOLS | {"stop": ["name", "say", "\n"]})
        assert called(choice) == [("add", {"a": 2})]
        assert choice["message"]["reasoning_content"] == "add, they say"
        choice = await answered(service, TOOLS | {"stop": ["add"]})
        assert choice["message"]["content"] == "Now I "
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function", "function": {"name": "a b"}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "add"}}, "tools[1]"),
        ({"type": "function", "function": {"name": "f", "parameters": "x"}}, "tools[1].function.parameters"),
        ({"type": "function"}, "tools[1]"),
    ],
)
async def test_tools_that_are_none_are_refused_by_name(tiny: Path, tool: Any, param: str) -> None:
    async with served(tiny) as service:
        response = await service.post(CHAT, HI | {"tools": [ADD, tool]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_tools_that_are_not_allowed_are_told_of_and_not_called(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(f"{CALL}\n{OTHER}")) as service:
        choice = await answered(service, TOOLS | {"tool_choice": allowing("sub")})
        other = await answered(service, TOOLS | {"tool_choice": allowing("sub", "add")})
        await service.answer(CHAT, TOOLS)
        assert len({row.request.prompt for row in service.engine.rows}) == 1
    assert called(choice) == [("sub", {})]
    assert choice["message"]["content"] == f"{CALL}\n"
    assert called(other) == [("add", {"a": 2}), ("sub", {})]


UNITS = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FORCED: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": UNITS}} for name in ("heat", "cool")
]


@pytest.mark.parametrize("template", [PLAIN, THINKS_ITSELF])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"heat", "cool"}),
        ({"type": "function", "function": {"name": "cool"}}, {"cool"}),
        (allowing("cool", mode="required"), {"cool"}),
    ],
)
async def test_a_call_is_forced(tmp_path: Path, template: str, choice: Any, names: set[str]) -> None:
    """Whatever a model with random weights would say."""
    asked = {"tools": FORCED, "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
    asked |= {"logit_bias": NO_BLANKS}
    if template == THINKS_ITSELF:
        asked["thinking_budget"] = 5
    async with served(checkpoint(tmp_path, template)) as service:
        for seed in range(3):
            for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": seed}):
                answer = await answered(service, HI | asked | sampling)
                [(name, arguments)] = called(answer)
                assert name in names
                assert arguments in ({"unit": "c"}, {"unit": "f"})
                assert answer["finish_reason"] == "tool_calls"
                assert not answer["message"]["content"]


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "any"},
        {"tool_choice": {"type": "function", "function": {"name": "mul"}}},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": allowing("add", "mul")},
        {"tool_choice": allowing("add", mode="required"), "regex": "a"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
async def test_a_call_that_cannot_be_forced_is_refused_by_name(tiny: Path, more: dict[str, Any]) -> None:
    async with served(tiny) as service:
        response = await service.post(CHAT, TOOLS | more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


async def test_other_families(tmp_path: Path) -> None:
    coder = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    channels = (
        "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 2}<|call|>'
    )
    texts: Sequence[tuple[str, str]] = ((CODER, coder), (HARMONY, channels))
    for number, (template, text) in enumerate(texts):
        async with served(checkpoint(tmp_path / str(number), template), sampler=script(text)) as service:
            choice = await answered(service, TOOLS)
        assert called(choice) == [("add", {"a": 2})]
        assert choice["message"]["content"] is None


async def test_a_schema_that_no_call_can_be_held_to_is_named_by_its_tool(tmp_path: Path) -> None:
    """Where the model is free to call, the schema is the template's business."""
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [ADD, {"type": "function", "function": {"name": "last", "parameters": unique}}]
    async with served(checkpoint(tmp_path, PLAIN), sampler=script("Done.")) as service:
        for choice in ("required", {"type": "function", "function": {"name": "last"}}):
            refused = await service.client.post(CHAT, json=TOOLS | {"tools": tools, "tool_choice": choice})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "tools[1].function.parameters"
            assert "uniqueItems" in error["message"]
            assert "call_" not in error["message"]
        assert (await answered(service, TOOLS | {"tools": tools}))["message"]["content"] == "Done."


@pytest.mark.parametrize("kind", ["boolean", ["array", "null"]])
async def test_arguments_that_are_no_object_are_refused_where_a_call_is_forced(tmp_path: Path, kind: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        refused = await service.client.post(CHAT, json=TOOLS | {"tools": tools, "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].function.parameters"


async def test_what_goes_on_for_ever_cannot_be_forced(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        body = TOOLS | {"tool_choice": "required", "ignore_eos": True}
        assert (await service.client.post(CHAT, json=body)).json()["error"]["param"] == "ignore_eos"


async def test_a_name_with_an_end_of_line_is_none(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f\n"}}]
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        assert (await service.client.post(CHAT, json=TOOLS | {"tools": tools})).status_code == 400


@pytest.mark.parametrize("held", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
async def test_an_answer_does_not_end_within_its_thought(tmp_path: Path, held: dict[str, Any]) -> None:
    """A model that likes nothing better than to end it has to come to what it was asked for."""
    bias = {"258": 100, "256": 100}
    body = (
        (TOOLS if "tool_choice" in held else HI) | held | {"logit_bias": bias, "temperature": 1, "max_tokens": 40}
    )
    async with served(checkpoint(tmp_path, THINKING)) as service:
        choice = (await service.answer(CHAT, body))["choices"][0]
    assert choice["finish_reason"] == "length"
