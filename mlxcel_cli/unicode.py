"""Whether a text is made of whole characters.

A text of Python's may hold halves of them, lone surrogates: bytes that are no UTF-8, in an argument or from a
terminal, or escapes of JSON. They can be neither sent nor written.
"""

import re

from engine.errors import UserError

HALF = re.compile("[\ud800-\udfff]")
BYTES = range(0xDC80, 0xDD00)  # how Python holds bytes that are no UTF-8 (PEP 383)


def fault(text: str) -> tuple[int, str] | None:
    """Where the first half of a character stands and what it is; None where there is none."""
    if (found := HALF.search(text)) is None:
        return None
    code = ord(found.group())
    what = f"byte 0x{code - 0xDC00:02x}" if code in BYTES else f"half of a character, \\u{code:04x},"
    return found.start(), f"{what} at {found.start()}"


def demand(text: str, what: str) -> None:
    """Raises UserError, which says that `what` is no text, for a text with halves of characters."""
    if (found := fault(text)) is not None:
        raise UserError(f"{what} is not UTF-8 text: {found[1]}")


def repaired(text: str) -> str:
    """`text` with halves that belong together joined, and U+FFFD in place of the others."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if HALF.search(text) else text
