"""Watched engines over tiny models that run in `spans`, with each type that keys and values are stored in."""

import itertools

import pytest

from engine.cache.dtype import BY_NAME
from tests.engines import Watched
from tests.tiny import write_checkpoint

SPANS_FAMILIES = ("llama", "gemma3_text")


@pytest.fixture(scope="session", params=itertools.product(SPANS_FAMILIES, BY_NAME), ids="-".join)
def watched(request, tmp_path_factory):
    family, cache_dtype = request.param
    watched = Watched(write_checkpoint(tmp_path_factory.mktemp(family), family), cache_dtype=cache_dtype)
    assert watched.engine.mode == "spans"
    return watched


@pytest.fixture(scope="session")
def real(real_checkpoint):
    return Watched(real_checkpoint)
