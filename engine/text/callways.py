"""The ways to write a call in which its arguments are a JSON object in the text, and how each begins and ends.

Of all other ways (tags around each argument, Python, lists, arguments within a text) nothing is known here: their
calls are read when they are whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.channels import ENDS, MESSAGE
from engine.text.toolcalls import ToolCalls

MAX_OPENING = 1024  # characters of a call before its arguments; what is longer begins none
_SPACE = r"[ \t\r\n]*+"
_NAME = r"(?P<name>[\w.:/-]{1,128})"
_OBJECT = r"(?=\{)"


@dataclass(frozen=True, slots=True)
class Way:
    """One way. `opening` matches all before the arguments, and groups the name and perhaps the model's own id.

    Behind the arguments come `ends` and, behind the last call, one of `tags`. `several`: there may be more calls
    between those tags, and each is whole when its `ends` have come. `start` is the tag before the first.
    """

    opening: re.Pattern[str]
    ends: tuple[str, ...]
    tags: tuple[str, ...]
    several: bool = False
    start: str = ""


def way_of(calls: ToolCalls) -> Way | None:
    """How a model writes its calls; None where that is none of these ways."""
    if calls.markup.harmony:
        header, message = rf"(?:(?!to=|{_text(MESSAGE)}).)*+to=\s*+(?:functions\.)?+", _text(MESSAGE)
        name = rf"(?P<name>(?:(?!<\|)\S)++)(?:(?!{message}).)*+"
        return Way(re.compile(f"{header}{name}{message}{_SPACE}{_OBJECT}", re.DOTALL), (), ENDS)
    if not calls.markup.calls:
        return None
    start, end = calls.markup.calls[0]
    tag = rf"\s*+(?:{_text(start)})"
    match calls.parser:
        case "" | "json_tools" | "longcat":
            key = rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{_NAME}"{_SPACE},{_SPACE}"(?:arguments|parameters)"'
            return Way(re.compile(f"{tag}{_SPACE}{key}{_SPACE}:{_SPACE}{_OBJECT}"), ("}",), (end,))
        case "mistral":
            name = r"(?P<name>[\w-]{1,128})"
            opening = rf"{tag}?\s*+{name}\s*\[ARGS\]\s*+{_OBJECT}"
            return Way(re.compile(opening), (), (end,), several=True, start=start)
        case "kimi_k2":
            own = rf"(?P<id>(?:functions\.)?{_NAME}:\d+)"
            begins, argues = _text("<|tool_call_begin|>"), _text("<|tool_call_argument_begin|>")
            opening = rf"{tag}?\s*+(?:{begins})?\s*+{own}\s*{argues}\s*+{_OBJECT}"
            return Way(re.compile(opening), ("<|tool_call_end|>",), (end,), several=True, start=start)
        case "kimi_k3":
            named = rf'<\|open\|>call tool="{_NAME}"(?: index="\d+")?<\|sep\|>'
            opening = rf'{tag}?\s*+{named}\s*+<\|open\|>json type="object"<\|sep\|>\s*+{_OBJECT}'
            ends = ("<|close|>json<|sep|>", "<|close|>call<|sep|>")
            return Way(re.compile(opening), ends, (end,), several=True, start=start)
    return None


def num_behind(text: str, ends: Sequence[str]) -> int | None:
    """How many characters of `text` are `ends`, with space before each; -1 where they may be still to come, None
    where `text` begins with something else.
    """
    rest = text
    for end in ends:
        rest = rest.lstrip()
        if not rest.startswith(end):
            return -1 if end.startswith(rest) else None
        rest = rest[len(end) :]
    return len(text) - len(rest)


def _text(literal: str) -> str:
    return re.escape(literal)
