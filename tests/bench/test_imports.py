"""Every benchmark can be started: what it imports is there."""

import importlib
import pkgutil

import pytest

import tests.bench


@pytest.mark.parametrize(
    "name",
    [found.name for found in pkgutil.iter_modules(tests.bench.__path__) if not found.name.startswith("test_")],
)
def test_its_imports_are_there(name: str) -> None:
    try:
        module = importlib.import_module(f"tests.bench.{name}")
    except ModuleNotFoundError as missing:  # a rival that is not installed
        if (missing.name or "").partition(".")[0] in ("", "engine", "server", "tests", "mlxcel_cli"):
            raise
    else:
        assert module.__doc__
