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
    """A model's calls. `parse(text, tools)` takes what is between a call's tags; None where no parser is known.

    `parser` is the name of the parser's module, empty for none.
    """

    def __init__(self, markup: Markup, parse: Parse | None = None) -> None:
        self.markup = markup
        self.parser = str(getattr(parse, "__module__", "")).rpartition(".")[2] if parse else ""
        self._parse: Parse = parse or (lambda text, tools: json.loads(text))

    @classmethod
    def of(cls, tokenizer: Any, markup: Markup) -> "ToolCalls":
        """Those of an mlx-lm tokenizer wrapper, which has chosen its parser from the template."""
        return cls(markup, tokenizer.tool_parser)

    def read(self, text: str, tools: Tools) -> tuple[Call, ...]:
        """The calls of a whole text with its tags; none where not all of it can be understood."""
        try:
            parsed = self._parsed(text, tools)
            found = parsed if isinstance(parsed, list | tuple) else [parsed]
            names = {tool["function"]["name"] for tool in tools}
            return tuple(_call(one, names) for one in found)
        except Exception as fault:  # noqa: BLE001
            # A parser is mlx-lm's own program over a model's own text: it may raise anything.
            log.debug("a tool call could not be read: %r", fault)
            return ()

    def _parsed(self, text: str, tools: Tools) -> Any:
        if self.markup.harmony:
            header, _, rest = text.partition(MESSAGE)
            end = next((tag for tag in ENDS if rest.endswith(tag)), "")
            return {"name": recipient(header), "arguments": json.loads(rest.removesuffix(end))}
        text = text.strip()
        for start, end in self.markup.calls:
            if text.startswith(start):
                inner = text.removeprefix(start).removesuffix(end)
                return self._parse(text if start == BARE_CALL[0] else inner, [dict(tool) for tool in tools])
        raise ValueError("the text has no tag that begins a call")


def is_readable(arguments: str) -> bool:
    """Whether `arguments` are JSON, and no value in it is beyond what JSON has words for."""
    try:
        _json(json.loads(arguments))
    except (ValueError, RecursionError):
        return False
    return True


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
    return Call(name, _json(arguments), own_id(parsed.get("id")))


def own_id(given: object) -> str:
    """The id that a model has written, or nothing where it can be none."""
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID and given.isprintable() else ""


def _json(value: Any) -> str:
    """JSON that is UTF-8; raises for what it has no word for, such as infinity or keys that are no text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        text = json.dumps(value, allow_nan=False)
    return text
