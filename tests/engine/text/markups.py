"""Markups of known model families, with a reply that calls a tool in each: real parsers of mlx-lm behind them."""

import importlib
import json
from typing import Any, NamedTuple

from engine.text.channels import CALLED, CHANNEL
from engine.text.filter import BARE_CALL, THINK, Markup
from engine.text.toolcalls import ToolCalls


class Family(NamedTuple):
    """A call to `add` with a 2 and b "x", and the parser's module, if it is one of mlx-lm's."""

    parser: str | None
    call: str
    more: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()


_JSON = '{"name": "add", "arguments": {"a": 2, "b": "x"}}'
_ARGUMENTS = '{"a": 2, "b": "x"}'
_PARAMETERS = "<parameter=a>\n2\n</parameter>\n<parameter=b>\nx\n</parameter>\n"

FAMILIES: dict[str, Family] = {
    "written out": Family(None, f"<tool_call>\n{_JSON}\n</tool_call>"),
    "json_tools": Family("json_tools", f"<tool_call>\n{_JSON}\n</tool_call>"),
    "qwen3_coder": Family(
        "qwen3_coder", f"<tool_call>\n<function=add>\n{_PARAMETERS}</function>\n</tool_call>", (BARE_CALL,)
    ),
    "qwen3_coder without its tag": Family(
        "qwen3_coder", f"<function=add>\n{_PARAMETERS}</function>\n</tool_call>", (BARE_CALL,)
    ),
    "glm47": Family(
        "glm47",
        "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value>x</arg_value></tool_call>",
    ),
    "longcat": Family("longcat", f"<longcat_tool_call>{_JSON}</longcat_tool_call>"),
    "mistral": Family("mistral", f"[TOOL_CALLS]add[ARGS]{_ARGUMENTS}"),
    "mistral list": Family("mistral", f"[TOOL_CALLS][{_JSON}]"),
    "kimi_k2": Family(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "kimi_k3": Family(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="add"<|sep|><|open|>json type="object"<|sep|>'
        f"{_ARGUMENTS}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "pythonic": Family("pythonic", '<|tool_call_start|>[add(a=2, b="x")]<|tool_call_end|>'),
    "gemma4": Family("gemma4", '<|tool_call>call:add{a:2,b:<|"|>x<|"|>}<tool_call|>'),
    "function_gemma": Family(
        "function_gemma", "<start_function_call>call:add{a:2,b:<escape>x<escape>}<end_function_call>"
    ),
    "minimax_m2": Family(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
        '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "minicpm5": Family(
        "minicpm5", '<function name="add"><param name="a">2</param><param name="b">x</param></function>'
    ),
    "muse_spark": Family(
        "muse_spark",
        '<atem:function_calls><atem:invoke name="add"><atem:parameter name="a">2</atem:parameter>'
        '<atem:parameter name="b">x</atem:parameter></atem:invoke></atem:function_calls>',
    ),
    "harmony": Family(
        None,
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        f"{_ARGUMENTS}<|call|>",
    ),
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
THOUGHTS = {
    "none": (None, ""),
    "think": (THINK, "<think>\nplan\n</think>\n\n"),
    "longcat": (("<longcat_think>", "</longcat_think>"), "<longcat_think>plan</longcat_think>"),
    "gemma4": (("<|channel>thought", "<channel|>"), "<|channel>thought\nplan<channel|>"),
    "kimi_k3": (
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        "<|open|>think<|sep|>plan<|close|>think<|sep|>",
    ),
}


LONG = 'x, "y" {[\\ é' * 12  # a value that makes arguments long enough to be streamed
# The families in whose calls the arguments are a JSON object.
JSON_WAYS = (
    "written out",
    "json_tools",
    "longcat",
    "mistral",
    "kimi_k2",
    "kimi_k3",
    "harmony",
)


def long_call(name: str) -> str:
    """The call of a family, whose b is `LONG` where the family writes JSON."""
    return FAMILIES[name].call.replace('"x"', json.dumps(LONG, ensure_ascii=False))


def markup_of(name: str, think: tuple[str, str] | None = None, *, opening: str = "") -> Markup:
    """The markup of a family, with tags around its thoughts."""
    family = FAMILIES[name]
    if name == "harmony":
        return Markup(harmony=True, calls=((CHANNEL, CALLED),), opening=opening)
    calls = (("<tool_call>", "</tool_call>"),)
    if family.parser:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{family.parser}")
        calls = ((module.tool_call_start, module.tool_call_end),)
    return Markup(think, (*calls, *family.more), family.dropped, opening=opening)


def tool_calls_of(name: str) -> ToolCalls:
    parser = FAMILIES[name].parser
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call if parser else None
    return ToolCalls(markup_of(name), parse)


def words_of(name: str) -> list[str]:
    """Texts out of which replies with markup, whole and broken, are made."""
    markup = markup_of(name, THINK)
    tags = [tag for pair in (*markup.calls, THINK) for tag in pair if tag]
    harmony = ["<|start|>assistant", "<|channel|>analysis", "<|message|>", "<|end|>", " to=functions.add"]
    call, long = FAMILIES[name].call, long_call(name)
    return [
        *tags, *markup.dropped, *(harmony if markup.harmony else []), call, call[: len(call) // 2],
        long, long[: len(long) // 2], long[: 3 * len(long) // 4], long[len(long) // 2 :], "}", "]",
        json.dumps({"name": "add"}), " ", "\n", "a", "```", "`", "\n```\n", "é", "{", '"', "\\d",
    ]  # fmt: skip
