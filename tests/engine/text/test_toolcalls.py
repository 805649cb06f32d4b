"""Calls out of markup: every family's are understood, and whatever is none is none, without a fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.filter import Markup
from engine.text.toolcalls import Call, ToolCalls
from tests.engine.text.markups import FAMILIES, TOOL, tool_calls_of, words_of


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_every_family_is_understood(name: str) -> None:
    text = FAMILIES[name].call.removesuffix("\n</tool_call>" if "without" in name else "")
    [call] = tool_calls_of(name).read(text, [TOOL])
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": "x"})


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(data=st.data())
def test_any_text_is_a_call_of_the_tools_or_none(name: str, data: st.DataObject) -> None:
    words = st.one_of(st.sampled_from(words_of(name)), st.text(max_size=4))
    text = "".join(data.draw(st.lists(words, max_size=8)))
    start = data.draw(st.sampled_from(["", FAMILIES[name].call[:12]]))
    for call in tool_calls_of(name).read(start + text, [TOOL]):
        assert call.name == "add"
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()


@pytest.mark.parametrize(
    "parsed",
    [
        None, 5, "text", [], {}, {"name": "add", "arguments": [1]}, {"name": "add", "arguments": "{"},
        {"name": "sub", "arguments": {}}, {"name": ["add"], "arguments": {}}, [{"name": "add"}, 3],
        {"name": "add", "arguments": {"a": {1, 2}}}, {"name": "add", "arguments": {"a": float("inf")}},
        {"name": "add", "arguments": {(1, 2): 3}},
    ],
)  # fmt: skip
def test_what_a_parser_returns_may_be_anything(parsed: object) -> None:
    calls = ToolCalls(Markup(calls=(("<c>", "</c>"),)), lambda text, tools: parsed)
    assert calls.read("<c>x</c>", [TOOL]) == ()


@pytest.mark.parametrize(
    "fault", [ValueError, KeyError, AttributeError, RecursionError, MemoryError, AssertionError]
)
def test_what_a_parser_raises_may_be_anything(fault: type[Exception]) -> None:
    def parse(text: str, tools: object) -> object:
        raise fault

    assert ToolCalls(Markup(calls=(("<c>", "</c>"),)), parse).read("<c>x</c>", [TOOL]) == ()


def test_half_a_surrogate_pair_is_escaped() -> None:
    text = '<c>{"name": "add", "arguments": {"b": "\\ud800"}}</c>'
    [call] = ToolCalls(Markup(calls=(("<c>", "</c>"),))).read(text, [TOOL])
    assert call == Call("add", '{"b": "\\ud800"}')


def test_a_models_own_id_is_kept() -> None:
    [call] = tool_calls_of("kimi_k2").read(FAMILIES["kimi_k2"].call, [TOOL])
    assert call.id == "functions.add:0"
