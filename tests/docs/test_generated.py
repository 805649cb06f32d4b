"""The generated pages are what the code says now."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
COMPLETIONS = DOCS.parent / "completions"


def test_the_settings_page_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / "settings.md").read_text() == generate["settings_page"](), "run `make docs`"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completions_are_current(shell):
    program = [sys.executable, "-c", "from mlxcel_cli.main import main; main()"]
    environment = {**os.environ, "_MLXCEL_COMPLETE": f"source_{shell}"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert (COMPLETIONS / f"mlxcel.{shell}").read_text() == ended.stdout, "run `make completions`"
