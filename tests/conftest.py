"""Fixtures that several rooms share."""

from pathlib import Path

import pytest

from engine.model.pull import ensure


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """The folder of SmolLM2-135M in this person's own store, so that it is fetched once and not once a run."""
    return ensure("smollm2-135m")
