"""Fixtures that several rooms share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model.pull import ensure
from engine.probe import Verdicts


@pytest.fixture(scope="session", autouse=True)
def _verdicts_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Probes of tiny checkpoints are kept between tests, and not in this person's own cache."""
    kept = Verdicts(tmp_path_factory.mktemp("probes"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.engine.Verdicts", lambda folder: kept)
        yield


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """The folder of SmolLM2-135M in this person's own store, so that it is fetched once and not once a run."""
    return ensure("smollm2-135m")
