"""How large and how deep a body may be, whatever it asks for. Knows no dialect.

The bytes of a body are bounded where they are read. These bounds are about what is made of them: nothing behind
them walks further down than `MAX_DEPTH`, or over more than `MAX_ITEMS` of one thing.
"""

from typing import Any

from engine.errors import RequestError

MAX_DEPTH = 64
MAX_ITEMS = 1 << 20
MAX_CHARACTERS = 16 << 20


def check_limits(value: Any) -> None:
    """Raise RequestError where a list, an object or a text within `value` is too large, or nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check(len(one), MAX_CHARACTERS, "a text", "characters")
            elif isinstance(one, list):
                _check(len(one), MAX_ITEMS, "a list", "items")
                below += [item for item in one if isinstance(item, (str, list, dict))]
            elif isinstance(one, dict):
                _check(len(one), MAX_ITEMS, "an object", "fields")
                below += [item for item in one.values() if isinstance(item, (str, list, dict))]
        if not below:
            return
        level = below
    raise RequestError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are read")


def _check(size: int, bound: int, what: str, of: str) -> None:
    if size > bound:
        raise RequestError(f"{what} in the body has {size} {of}; at most {bound} are read")
