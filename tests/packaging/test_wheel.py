"""The wheel holds the program and nothing else, and what it installs starts."""

import configparser
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlxcel_cli.binary.build import NATIVE, ROOT, built_wheel

LEFT_OUT = ("engine/native/", "mlxcel_cli/binary/")  # packages and programs of their own


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    return found


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_it_holds_every_module_and_the_page_and_nothing_else(wheel: Path) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("engine", "mlxcel_cli", "server")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    program = {name for name in here if not name.startswith(LEFT_OUT)}
    assert {PurePosixPath(name).suffix for name in program} == {".py", ".txt", ".html", ".css", ".js", ".svg"}
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert names == program


def test_it_says_what_it_is(wheel: Path, metadata: importlib.metadata.Distribution) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = metadata.metadata
    assert (said["Name"], said["Version"]) == ("mlxcel", project["version"])
    assert (said["License-Expression"], said["Requires-Python"]) == ("Apache-2.0", project["requires-python"])
    assert said["Description"] == (ROOT / "README.md").read_text()
    assert wheel.name.endswith("-py3-none-any.whl")
    folder = f"mlxcel-{project['version']}.dist-info"
    with zipfile.ZipFile(wheel) as packed:
        assert packed.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entries = configparser.ConfigParser()
        entries.read_string(packed.read(f"{folder}/entry_points.txt").decode())
    assert {name: dict(entries[name]) for name in entries.sections()} == {"console_scripts": project["scripts"]}


def test_it_needs_what_the_project_needs_and_no_tools(metadata: importlib.metadata.Distribution) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = [line for line in metadata.requires or [] if "extra ==" not in line]
    assert names(always) == names(project["dependencies"])
    assert set(metadata.metadata.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])


def test_what_it_installs_starts(wheel: Path, metadata: importlib.metadata.Distribution, tmp_path: Path) -> None:
    """In an environment of its own, which borrows the dependencies of this one."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}

    def run(*command: str | Path) -> str:
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel)
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"))
    (purelib / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    assert run(tmp_path / "venv/bin/mlxcel", "--version") == f"mlxcel {metadata.version}\n"
    assert "Run and serve language models" in run(tmp_path / "venv/bin/mlxcel", "--help")
    said = run(python, "-c", "import engine.config, mlxcel_cli, server.page; print(engine.config.__file__)")
    assert Path(said.strip()).is_relative_to(purelib)


def test_the_compiled_kernels_are_one_module() -> None:
    try:
        kernels = importlib.metadata.distribution(NATIVE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the compiled kernels are not installed")
    files = [file for file in kernels.files or [] if not file.parts[0].endswith(".dist-info")]
    assert [file.name.partition(".")[0] for file in files] == ["mlxcel_native"]
    assert names(kernels.requires or []) <= {"mlx"}
