"""The executable that `make binary` makes, in a root folder with the C library and no Python or compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel_cli.binary import build
from tests.packaging.executable import bare_root, enter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the executable is for Linux")
README_PROMPT = "What is the capital of France?"


@pytest.mark.real
def test_it_answers_where_there_is_neither_python_nor_compiler(real_checkpoint: Path, tmp_path: Path) -> None:
    root = bare_root(tmp_path / "root")
    inside = enter(root)
    (root / "bin").mkdir()
    try:
        build.build(root / "bin/mlxcel", level=1)
    except build.CannotBuild as missing:
        pytest.skip(str(missing))
    shutil.copytree(real_checkpoint, root / "home/models" / real_checkpoint.parent.name / real_checkpoint.name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*inside, "/bin/mlxcel", *arguments],
            env={"PATH": os.environ["PATH"], "MLXCEL_HOME": "/home"},
            capture_output=True,
            text=True,
            check=False,
        )

    ended = run("run", "-p", README_PROMPT)
    assert (ended.returncode, ended.stdout) == (0, "The capital of France is Paris.\n"), ended.stderr
    assert run("--version").stdout.startswith("mlxcel ")
    said = run("doctor", "--offline").stdout
    assert "computing on the cpu" in said
    assert ("kernels   native" in said) == bool(build.has_native())
    page = next(root.glob("home/binary/*/lib*/python*/server/web/index.html"))
    assert page.read_text("utf-8").startswith("<!doctype html>")
