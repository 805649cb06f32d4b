"""Bodies to typed requests. Every field acts or is refused by name; null means "not given".

The types say what acts. A field of the dialect that does not act yet may be sent with the value that asks for
nothing; any other value of it is refused, and so is a field that nobody knows. What of a dialect does not act is
its type's own NEUTRAL.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from server.limits import check_limits

MAX_NAME = 1024
MAX_ECHOED = 100  # characters of a body's names that errors repeat

# Sent by clients as a matter of course, and about nothing that this server does.
MEANINGLESS = frozenset({"store", "metadata", "client_metadata", "service_tier", "safety_identifier"})

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Body = TypeVar("Body", bound=msgspec.Struct)


def neutral_of(body_type: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """The fields of the type's dialect that do not act, with the values of them that ask for nothing."""
    neutral: Mapping[str, tuple[Any, ...]] = getattr(body_type, "NEUTRAL", {})
    return neutral


def parse(data: bytes, body_type: type[Body]) -> Body:
    """The typed body. Raises RequestError that names the field at fault."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise RequestError(f"the body is not JSON: {fault}") from fault
    except RecursionError as fault:
        raise RequestError("the body is nested too deeply") from fault
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    check_limits(raw)
    neutral = neutral_of(body_type)
    known = {field.encode_name for field in msgspec.structs.fields(body_type)}
    given = {}
    for name, value in raw.items():
        if value is None or (name in MEANINGLESS and name not in known):
            continue
        if name in known:
            given[name] = value
        elif name not in neutral:
            raise RequestError(_unknown(name, known), param=name[:MAX_ECHOED])
        elif not any(_same(value, accepted) for accepted in neutral[name]):
            accepted = " or ".join(msgspec.json.encode(accepted).decode() for accepted in neutral[name])
            but = f"; only {accepted} is accepted" if accepted else ""
            raise RequestError(f"{name} is not supported here{but}", param=name)
    return convert(given, body_type, "")


def _same(value: Any, neutral: Any) -> bool:
    """Equality as in JSON, where false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: set[str]) -> str:
    name = name[:MAX_ECHOED]
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def convert(value: Any, kind: type[Body], where: str) -> Body:
    """`value`, found at `where`, as that type. Raises RequestError that names the place at fault."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as fault:
        message, _, place = str(fault).partition(" - at `")  # "`$.stop[0]`", or "`key in $.logit_bias`"
        param = (where + place.rpartition("$")[2].rstrip("`")).lstrip(".")
        raise RequestError(f"{param}: {message}" if param else message, param=param) from fault
    except RecursionError as fault:
        raise RequestError("the body is nested too deeply") from fault
