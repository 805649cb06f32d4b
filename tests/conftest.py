"""Fixtures that several rooms share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from engine.model.pull import ensure
from engine.probe import Verdicts
from tests.tiny import write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _verdicts_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Probes of tiny checkpoints are kept between tests, and not in this person's own cache."""
    kept = Verdicts(tmp_path_factory.mktemp("probes"))
    with pytest.MonkeyPatch.context() as patch:
        for user in ("engine.engine", "engine.model.inspect"):
            patch.setattr(f"{user}.Verdicts", lambda folder: kept)
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
