"""Watched engines over tiny models that run in `spans`."""

import pytest

from tests.engines import Watched
from tests.tiny import write_checkpoint

SPANS_FAMILIES = ("llama", "gemma3_text")


@pytest.fixture(scope="session", params=SPANS_FAMILIES)
def watched(request, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    watched = Watched(folder)
    assert watched.engine.mode == "spans"
    return watched


@pytest.fixture(scope="session")
def real(real_checkpoint):
    return Watched(real_checkpoint)
