"""Files as part of a prompt: their text, each under its name. It knows nothing of who asks."""

import os
import re
import select
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from mlxcel_cli import render, unicode

MOST_BYTES = 1_000_000
SILENCE_S = 1.0
BACKTICKS = re.compile(r"`{3,}")
QUOTED = re.compile(r"(?P<name>[^\n]+):\n(?P<marks>`{3,})\n.*?\n(?P=marks)(?:\n\n|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Quote:
    """A file's text under the name that the person gave."""

    name: str
    text: str

    def __str__(self) -> str:
        """As it stands in a prompt: the name, and the text between marks."""
        marks = "`" * max([3, *(len(run) + 1 for run in BACKTICKS.findall(self.text))])
        end = "" if self.text.endswith("\n") else "\n"
        return f"{self.name}:\n{marks}\n{self.text}{end}{marks}"

    @property
    def size(self) -> str:
        """How much it is."""
        return f"{render.count(len(self.text.splitlines()), 'line')}, {render.size(len(self.text.encode()))}"


def quote(name: str, *, may_wait: bool = False) -> Quote:
    """The text of the file called `name`. With `may_wait` it may be a pipe, which is read to its end.

    Raises UserError naming a file that is missing, no file, empty, too large or not text.
    """
    return Quote(unicode.repaired(name), _text(path_of(name), name, may_wait=may_wait))


def before(prompt: str, quotes: Iterable[Quote]) -> str:
    """A prompt behind the files that it is about."""
    return "\n\n".join([*map(str, quotes), *([prompt] if prompt else [])])


def parted(text: str) -> tuple[list[str], str]:
    """What `before` put together: the names of the files, and the prompt behind them."""
    names = []
    while (quoted := QUOTED.match(text)) is not None:
        names.append(quoted["name"])
        text = text[quoted.end() :]
    return names, text


def path_of(name: str) -> Path:
    """The file that a person means by `name`. Raises UserError for the home of somebody unknown."""
    try:
        return Path(name).expanduser().absolute()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from None


def demand_end(path: Path, name: object, *, most_bytes: int | None = None) -> None:
    """Raises UserError for a pipe or a device, whose reading need not end, and for more than `most_bytes`; OSError
    where there is nothing, and ValueError for what cannot be a path.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise UserError(f"{name} is no file that ends")
    if most_bytes is not None and stat.S_ISREG(found.st_mode) and found.st_size > most_bytes:
        raise UserError(f"{name} is too large: it may have {render.size(most_bytes)}")


def _text(path: Path, name: str, *, may_wait: bool) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{name} is a folder")
        if not may_wait:
            demand_end(path, name)
        content = _content(path, name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{name} cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{name} is too large: a file may have {render.size(MOST_BYTES)}")
    if b"\0" in content:
        raise UserError(f"{name} is not text: byte 0x00 at {content.index(0)}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{content[error.start]:02x} at {error.start}"
        raise UserError(f"{name} is not UTF-8 text: {wrong}") from None
    if not text.strip():
        raise UserError(f"{name} is empty")
    return text


def _content(path: Path, name: str) -> bytes:
    """Its bytes, one more than a file may have at most. A pipe that gives nothing is told of: it may take long."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not select.select([file], [], [], SILENCE_S)[0]:
            render.note(f"waiting for what {name} gives")
            select.select([file], [], [])
        os.set_blocking(file.fileno(), True)
        return file.read(MOST_BYTES + 1)
