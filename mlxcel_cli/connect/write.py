"""Writes a client's file in one step, with what it held before kept beside it."""

import os
import shutil
import stat
from pathlib import Path

from engine.errors import UserError
from mlxcel_cli.draft import draft_of

OWN_MODE = 0o600


def is_writable(path: Path) -> bool:
    """Whether its mode lets anybody change it, and us."""
    return bool(path.stat().st_mode & 0o222) and os.access(path, os.W_OK)


def write(path: Path, text: str, *, before: str | None) -> Path | None:
    """Have `path` hold `text` in place of `before`, which is None where no file is; what it held is returned as a
    file beside it.

    A link is followed, and the file keeps its mode. Raises OSError, and UserError where it holds something else.
    """
    path, content = path.resolve(), text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = None
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else OWN_MODE
    try:
        with draft_of(path) as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            held = path.read_bytes() if path.exists() else None
            if held != (None if before is None else before.encode()):
                raise UserError(
                    f"{path} was changed meanwhile: nothing is written", hint="look at it, and run this again"
                )
            if held is not None:
                backup = _unused(path)
                shutil.copy2(path, backup)
    except BaseException:
        if backup is not None:
            backup.unlink()
        raise
    return backup


def _unused(path: Path) -> Path:
    """A name beside `path` that nothing has."""
    number = 0
    while (backup := path.with_name(f"{path.name}.bak{number or ''}")).exists():
        number += 1
    return backup
