"""Fixtures of the replayed cases."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel_cli.main import outcome


@pytest.fixture
def mlxcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The program in this process, with a file that holds `stdin`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*arguments: str, stdin: bytes = b"") -> int:
        path = tmp_path / "stdin"
        path.write_bytes(stdin)
        with open(path) as file:
            monkeypatch.setattr(sys, "stdin", file)
            return outcome(arguments)

    return run
