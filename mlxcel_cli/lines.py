"""Where messages come from, and the one rule of multi-line ones: three quotes begin them and three end them.

Here is the source that reads a pipe, a file or a dumb terminal; a keyboard is another. Neither knows what a
message means.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from engine.errors import UserError
from mlxcel_cli.interrupt import interrupt_calls

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
READ_BYTES = 65536


class Lines(Protocol):
    """A source of messages. `edits`: its lines can be edited, with a history and completion."""

    edits: bool

    async def read(self, status: str = "") -> str | None:
        """The next message, without its quotes; None when there are no more. `status` may be shown meanwhile."""


def is_open(text: str) -> bool:
    """Whether `text` begins with three quotes that are not closed yet."""
    begun = text.lstrip()
    return begun.startswith(QUOTES) and not (begun.rstrip().endswith(QUOTES) and len(begun.rstrip()) >= 6)


def unquoted(text: str) -> str:
    """A message without the three quotes around it and the line breaks next to them."""
    begun = text.strip()
    if not begun.startswith(QUOTES):
        return text
    return begun.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


class Piped:
    """Messages from a descriptor as it is: one a line, or one between three quotes.

    `ask`, where somebody types, is told each prompt, and the end of a line that has none of its own: by Ctrl-D, or
    by Ctrl-C, at which the terminal forgets the line.
    """

    edits = False

    def __init__(self, descriptor: int, ask: Callable[[str], None] | None = None) -> None:
        self._descriptor = descriptor
        self._ask = ask
        self._rest = b""
        self._ended = False

    async def read(self, status: str = "") -> str | None:
        line = await self._line(PROMPT)
        while line is not None and is_open(line):
            if (more := await self._line(CONTINUED)) is None:
                break
            line += "\n" + more
        return None if line is None else unquoted(line)

    async def _line(self, prompt: str) -> str | None:
        if self._ask is None:
            await self._fill()
        else:
            ask = self._ask
            ask(prompt)
            with interrupt_calls(lambda: ask(f"\n{prompt}")):
                await self._fill()
            if b"\n" not in self._rest:
                ask("\n")
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return text_of(line).removesuffix("\r")

    async def _fill(self) -> None:
        """Read until a line is whole, or there is no more."""
        while b"\n" not in self._rest and not self._ended:
            await _readable(self._descriptor)
            piece = os.read(self._descriptor, READ_BYTES)
            self._rest += piece
            self._ended = not piece


async def _readable(descriptor: int) -> None:
    """Return when a read will not block. Regular files never do, and cannot be waited for."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    with suppress(PermissionError):
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)


def text_of(content: bytes) -> str:
    """Text from stdin. Raises UserError where it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not UTF-8 text: byte 0x{content[error.start]:02x} at {error.start}") from None
