"""TOML as files of this project hold it. It does not know which keys they have."""

import tomllib
from pathlib import Path
from typing import Any

from engine.errors import UserError
from mlxcel_cli import files

MOST_BYTES = 16_000_000
MOST_INTEGER = 2**63  # TOML's own bound


def read(path: Path, what: str) -> dict[str, Any]:
    """The keys and values of the file at `path`, which errors call `what`.

    Raises FileNotFoundError, and UserError where it cannot be read or is not TOML.
    """
    try:
        files.demand_end(path, what, most_bytes=MOST_BYTES)
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{what} cannot be read: {reason}") from None
    try:
        return parsed(text)
    except ValueError as error:
        raise UserError(f"{what} is not TOML: {error}") from None


def parsed(text: str) -> dict[str, Any]:
    """The keys and values of `text`. Raises ValueError for what is not TOML, however it is not."""
    try:
        said = tomllib.loads(text)
        _demand_integers(said)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python does not read a number of thousands of digits
        raise ValueError("a number is too large") from None
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None
    return said


def _demand_integers(value: Any) -> None:
    if isinstance(value, int) and not -MOST_INTEGER <= value < MOST_INTEGER:
        raise ValueError("out of the bounds of TOML")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _demand_integers(part)
