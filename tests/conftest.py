"""Fixtures that several rooms share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from engine.model.pull import ensure
from engine.probe import Verdicts
from engine.remembered import Remembered
from mlxcel_cli import session
from tests.tiny import write_checkpoint


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: the collector need not look through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _verdicts_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Probes of tiny checkpoints are kept between tests, and not in this person's own cache; nor is what pays."""
    kept = Verdicts(tmp_path_factory.mktemp("probes"))
    drafts = Remembered(tmp_path_factory.mktemp("drafts"))
    with pytest.MonkeyPatch.context() as patch:
        for user in ("engine.engine", "engine.model.inspect", "engine.speculate.drafter"):
            patch.setattr(f"{user}.Verdicts", lambda folder: kept)
        patch.setattr("engine.engine.Remembered", lambda folder: drafts)
        yield


@pytest.fixture(scope="session", autouse=True)
def _not_ended() -> Iterator[None]:
    """No test ends the process that runs the others, however slowly its server shuts down."""

    def end(code: int) -> None:
        raise AssertionError(f"this process would have ended with {code}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", end)
        patch.setattr(session, "GRACE_S", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _off_the_hub() -> Iterator[None]:
    """Keep every test and the processes it starts off the model hub; those about it use a double."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """The folder of SmolLM2-135M in this person's own store, so that it is fetched once and not once a run."""
    return ensure("smollm2-135m")


@pytest.fixture(scope="session")
def real_base_checkpoint() -> Path:
    """The folder of Gemma 3 270M, a base model, in the same store."""
    return ensure("gemma3-270m")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose greedy answers differ from prompt to prompt."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "gemma3", "gemma3_text")
