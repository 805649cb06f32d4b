"""The grammar of a reply that has to call tools, as text: llguidance's Lark, with JSON schemas in it.

Whatever a family's own way to write calls is, a forced one is JSON between `PLAIN_CALLS`, which any model can be
held to and `ToolCalls` reads without a family's parser; Harmony's is a message to the function. Knows nothing of
how a grammar is kept to, nor of thoughts before the calls but for Harmony's, which are a channel.
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.text.channels import CALLED, CHANNEL, END, MESSAGE, START
from engine.text.filter import PLAIN_CALLS, Markup
from engine.text.toolcalls import Tools

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(markup: Markup, tools: Tools, *, parallel: bool) -> str:
    """A grammar of one call to one of `tools`, or with `parallel` of one or several."""
    assert tools, "a call needs a tool"
    return _channels(tools) if markup.harmony else _tags(tools, parallel)


def forced(markup: Markup) -> Markup:
    """The markup of a reply that is held to `call_grammar`."""
    return markup if markup.harmony else Markup(markup.think, PLAIN_CALLS, opening=markup.opening)


def _tags(tools: Tools, parallel: bool) -> str:
    [(start, end)] = PLAIN_CALLS
    rules = ['start: call ("\\n" call)*\n' if parallel else "start: call\n", f"call: {_any_of(tools)}\n"]
    for number, tool in enumerate(tools):
        before = f'{start}\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": '
        rules.append(f"call_{number}: {json.dumps(before)} json_{number} {json.dumps('}' + chr(10) + end)}\n")
    return "".join(rules) + _arguments(tools)


def _channels(tools: Tools) -> str:
    """A thought, if the model has one, and a call; the token that ends a call ends the reply, so there is one."""
    rules = [
        f"start: thought? ({_any_of(tools)}) {CALLED}?\n",
        f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"\n',
        "TEXT: /(.|\\n)*/\n",
    ]
    for number, tool in enumerate(tools):
        before = f"commentary to=functions.{tool['function']['name']} "
        rules.append(
            f'call_{number}: {CHANNEL} {json.dumps(before)} <|constrain|> "json" {MESSAGE} json_{number}\n'
        )
    return "".join(rules) + _arguments(tools)


def _any_of(tools: Tools) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _arguments(tools: Tools) -> str:
    """A rule for the arguments of each tool: schemas of their own, so that their references hold."""
    schemas = [json.dumps(arguments_schema(tool)) for tool in tools]
    return "".join(f"json_{number}: %json {schema}\n" for number, schema in enumerate(schemas))


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, which are an object whatever else it allows."""
    return {**(tool["function"].get("parameters") or NO_PARAMETERS), "type": "object"}


def takes_object(tool: Mapping[str, Any]) -> bool:
    """Whether the schema of a tool's arguments names an object among its types, if it names any."""
    kinds = (tool["function"].get("parameters") or NO_PARAMETERS).get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])
