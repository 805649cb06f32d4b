"""What earlier runs have found out about a checkpoint on this machine, kept in small files.

A file that cannot be read or written is no matter: then it is found out again.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx


class Remembered:
    """JSON values by name, one file each in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Any:
        """What was kept under `name`, or None."""
        try:
            return json.loads(self._file(name).read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def keep(self, name: str, value: Any) -> None:
        """Keep `value` in place of what was there."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._file(name).with_suffix(f".{time.time_ns()}")
            draft.write_text(json.dumps(value))
            draft.replace(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def fingerprint(*checkpoints: Path, said: tuple[str, ...] = ()) -> str:
    """A name for what depends on these checkpoints' files, on what is `said`, on versions and device.

    Raises OSError for a folder that is no checkpoint.
    """
    digest = hashlib.sha256()
    for checkpoint in checkpoints:
        digest.update((checkpoint / "config.json").read_bytes())
        weights = sorted(checkpoint.glob("*.safetensors"))
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
        digest.update(repr(files).encode())
    versions = [importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "mlxcel")]
    digest.update(repr((versions, *said, str(mx.default_device()))).encode())
    return digest.hexdigest()[:24]
