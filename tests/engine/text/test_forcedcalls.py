"""The grammar of forced calls, as text: every tool with its own schema, and what it writes is what is read."""

import json

from engine.text.forcedcalls import call_grammar, forced
from engine.text.toolcalls import ToolCalls
from tests.engine.text.markups import TOOL, markup_of

REFERS = {
    "type": "function",
    "function": {
        "name": 'find_"it"',
        "parameters": {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}},
    },
}
NONE = {"type": "function", "function": {"name": "now", "parameters": None}}


def rules(grammar: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in grammar.splitlines())


def test_every_tool_has_its_schema_as_a_whole() -> None:
    for name in ("written out", "harmony"):
        found = rules(call_grammar(markup_of(name), [TOOL, REFERS, NONE], parallel=True))
        schemas = [json.loads(found[f"json_{number}"].removeprefix("%json ")) for number in range(3)]
        assert schemas[0] == TOOL["function"]["parameters"]
        assert schemas[1] == {"type": "object", **REFERS["function"]["parameters"]}
        assert schemas[2] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_what_is_written_is_read_whatever_the_familys_own_way() -> None:
    for name in ("written out", "glm47", "pythonic"):
        found = rules(call_grammar(markup_of(name), [TOOL], parallel=False))
        before, after = (json.loads(text) for text in found["call_0"].split(" json_0 "))
        markup = forced(markup_of(name))
        [call] = ToolCalls(markup).read(before + '{"a": 2}' + after, [TOOL])
        assert (call.name, call.arguments) == ("add", '{"a": 2}')
        assert found["start"] == "call"


def test_several_calls_only_where_they_may_be() -> None:
    assert "*" in rules(call_grammar(markup_of("glm47"), [TOOL], parallel=True))["start"]
    assert "*" not in rules(call_grammar(markup_of("harmony"), [TOOL], parallel=True))["start"]
