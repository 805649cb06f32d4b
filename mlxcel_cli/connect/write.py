"""Writes a client's file in one step, with what it held before kept beside it."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

OWN_MODE = 0o600


def write(path: Path, text: str) -> Path | None:
    """Have `path` hold `text`; where it existed, what it held is returned as a file beside it.

    A link is followed, and the file keeps its mode. Raises OSError.
    """
    path, content = path.resolve(), text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = None
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else OWN_MODE
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        if path.exists():
            backup = _unused(path)
            shutil.copy2(path, backup)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return backup


def _unused(path: Path) -> Path:
    """A name beside `path` that nothing has."""
    number = 0
    while (backup := path.with_name(f"{path.name}.bak{number or ''}")).exists():
        number += 1
    return backup
