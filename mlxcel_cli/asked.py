"""What a person asks of every answer: the fields of a request that the command line has names for.

`asked` is always a mapping of those that were given, by what the wire calls them. Kinds and bounds are those of
the settings of the same name.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from mlxcel_cli import config, unicode

FIELDS = {"temp": "temperature"} | {name: name for name in ("top_p", "top_k", "min_p", "repeat_penalty", "seed")}
NAMES = {**FIELDS, "max_tokens": "max_tokens", "stop": "stop"}
DEFAULT = "default"


def changed(asked: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """`asked` with the field called `name` set to what `text` says; "default" takes it out again.

    Raises ConfigError for a name that is unknown, with the nearest as its hint, and for a value that does not do.
    """
    wire = wire_name(name)
    rest = {field: value for field, value in asked.items() if field != wire}
    if text == DEFAULT:
        return rest
    value = _value(wire, text)
    return rest if value is None else {**rest, wire: value}


def lines(asked: Mapping[str, Any]) -> list[str]:
    """Every field with its value, one a line."""
    width = max(map(len, NAMES))
    return [f"{name:{width}}  {said(asked, name)}" for name in NAMES]


def said(asked: Mapping[str, Any], name: str) -> str:
    """The value of one field, as it could be typed."""
    wire = wire_name(name)
    if wire not in asked:
        return DEFAULT
    if wire == "stop":
        return " ".join(json.dumps(text, ensure_ascii=False) for text in asked[wire])
    return str(asked[wire])


def wire_name(name: str) -> str:
    """What the wire calls the field called `name`. Raises ConfigError for one that is unknown."""
    written = name.replace("-", "_").lower()
    if written in NAMES:
        return NAMES[written]
    if written in NAMES.values():
        return written
    near = difflib.get_close_matches(written, NAMES, n=1, cutoff=0.5)
    raise ConfigError(
        written, f"unknown setting {name}", hint=f"did you mean {near[0]}?" if near else "/set lists them"
    )


def _value(wire: str, text: str) -> Any:
    """What `text` says of the field; None where it says "no bound"."""
    if wire == "stop":
        return [_unquoted(text)]
    if wire == "max_tokens":
        return _bound(text)
    return config.value_of(next(name for name, field in FIELDS.items() if field == wire), text)


def _bound(text: str) -> int | None:
    try:
        bound = int(text)
    except ValueError:
        raise ConfigError("max_tokens", f"max_tokens must be a whole number, not {text!r}") from None
    if bound < -1:
        raise ConfigError("max_tokens", f"max_tokens must be at least -1, not {bound}")
    return None if bound == -1 else bound


def _unquoted(text: str) -> str:
    """A text as it is; between double quotes, one with JSON's escapes."""
    if not text.startswith('"'):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        raise ConfigError("stop", f"stop: {text} is not closed or has an escape that JSON does not know") from None
    assert isinstance(value, str), "JSON that begins with a quote is a string"
    if not value:
        raise ConfigError("stop", "stop: an empty text would end every answer before it begins")
    unicode.demand(value, "stop")
    return value
