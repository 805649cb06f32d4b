"""Tool calls out of the markup that a model wrote them in.

The parsers are given, since mlx-lm's come with MLX, and may raise or return anything: what is no call to one of
the request's tools, with arguments that are a JSON object, is no call here, and whoever asked has the text still.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.channels import ENDS, MESSAGE, recipient
from engine.text.filter import BARE_CALL, Markup
from engine.text.parts import Part

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
Parse = Callable[[str, Any], Any]
MAX_ID = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A call to `name`. `arguments` is the text of a JSON object; `id` is the model's own, or empty."""

    name: str
    arguments: str
    id: str = ""


class ToolCalls:
    """A model's calls. `parse(text, tools)` takes what is between a call's tags; None where no parser is known."""

    def __init__(self, markup: Markup, parse: Parse | None = None) -> None:
        self._markup = markup
        self._parse: Parse = parse or (lambda text, tools: json.loads(text))

    @classmethod
    def of(cls, tokenizer: Any, markup: Markup) -> "ToolCalls":
        """Those of an mlx-lm tokenizer wrapper, which has chosen its parser from the template."""
        return cls(markup, tokenizer.tool_parser)

    def read(self, part: Part, tools: Tools) -> tuple[Call, ...]:
        """The calls of a part of that kind; none where not all of it can be understood."""
        try:
            parsed = self._parsed(part, tools)
            found = parsed if isinstance(parsed, list | tuple) else [parsed]
            names = {tool["function"]["name"] for tool in tools}
            return tuple(_call(one, names) for one in found)
        except Exception as fault:  # noqa: BLE001
            # A parser is mlx-lm's own program over a model's own text: it may raise anything.
            log.debug("a tool call could not be read: %r", fault)
            return ()

    def _parsed(self, part: Part, tools: Tools) -> Any:
        if self._markup.harmony:
            header, _, rest = part.text.partition(MESSAGE)
            end = next((tag for tag in ENDS if rest.endswith(tag)), "")
            return {"name": recipient(header), "arguments": json.loads(rest.removesuffix(end))}
        text = part.text.strip()
        for start, end in self._markup.calls:
            if text.startswith(start):
                inner = text.removeprefix(start).removesuffix(end)
                return self._parse(text if start == BARE_CALL[0] else inner, [dict(tool) for tool in tools])
        raise ValueError("the text has no tag that begins a call")


def _call(parsed: Mapping[str, Any], names: set[str]) -> Call:
    """Raises anything where `parsed` is no call to one of `names`."""
    name = parsed["name"]
    if name not in names:
        raise ValueError(f"no such tool: {name!r}")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    given = parsed.get("id")
    own = given if isinstance(given, str) and 0 < len(given) <= MAX_ID and given.isprintable() else ""
    return Call(name, _json(arguments), own)


def _json(value: Any) -> str:
    """JSON that is UTF-8; raises for what it has no word for, such as infinity or keys that are no text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        text = json.dumps(value, allow_nan=False)
    return text
