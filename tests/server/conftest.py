"""Fixtures of the server's tests."""

from pathlib import Path

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose greedy answers differ from prompt to prompt."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "gemma3", "gemma3_text")
