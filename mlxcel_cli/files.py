"""Files as part of a prompt: their text, each under its name. It knows nothing of who asks."""

import re
import stat
from collections.abc import Iterable
from pathlib import Path

from engine.errors import UserError
from mlxcel_cli import render

MOST_BYTES = 1_000_000
BACKTICKS = re.compile(r"`{3,}")


def quoted(name: str, *, may_wait: bool = False) -> str:
    """The text of the file called `name`, as it stands in a prompt: its name, and the text between marks.

    With `may_wait` it may be a pipe, which is read to its end. Raises UserError naming a file that is missing, no
    file, empty, too large or not text.
    """
    text = _text(path_of(name), name, may_wait=may_wait)
    marks = "`" * max([3, *(len(run) + 1 for run in BACKTICKS.findall(text))])
    end = "" if text.endswith("\n") else "\n"
    return f"{name}:\n{marks}\n{text}{end}{marks}"


def before(prompt: str, quotes: Iterable[str]) -> str:
    """A prompt behind the files that it is about."""
    return "\n\n".join([*quotes, *([prompt] if prompt else [])])


def path_of(name: str) -> Path:
    """The file that a person means by `name`. Raises UserError for the home of somebody unknown."""
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:
        raise UserError(f"{name}: {error}") from None


def _text(path: Path, name: str, *, may_wait: bool) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{name} is a folder")
        if not stat.S_ISREG(mode) and not may_wait:
            raise UserError(f"{name} is no file that ends")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
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
