"""The compiled kernels, at every level of this CPU; without the package these tests are skipped by name."""

import pytest

from engine.kernels import native

LEVELS = native.mlxcel_native.levels() if native.mlxcel_native else ["no compiled package"]


@pytest.fixture
def compiled():
    """The package, as it was found afterwards."""
    started = native.start(2)
    if isinstance(started, str):
        pytest.skip(f"kernels: portable ({started})")
    package = native.mlxcel_native
    level, num_threads = package.level(), package.num_threads()
    yield package
    package.use_level(level)
    package.set_num_threads(num_threads)


@pytest.fixture(params=LEVELS)
def level(request, compiled):
    """One level after the other, in use."""
    assert compiled.use_level(request.param)
    return request.param
