"""What the executable carries: the same bytes for the same files, and all that a distribution needs."""

import os
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

import pytest

from mlxcel_cli.binary import archive, closure, libraries, tree


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text("launcher")
    for place, made_s in (("one", 1), ("other", 2)):
        (tmp_path / place).mkdir()
        names = sorted(("b", "a", "c"), reverse=place == "one")
        for name in names:
            (tmp_path / place / name).write_text(name * 1000)
            os.utime(tmp_path / place / name, (made_s, made_s))
        (tmp_path / place / "a").chmod(0o755 if place == "one" else 0o700)
        files: archive.Files = {PurePosixPath("bin", name): tmp_path / place / name for name in names}
        archive.write(tmp_path / f"{place}.out", tmp_path / "launcher", files, level=1)
    assert (tmp_path / "one.out").read_bytes() == (tmp_path / "other.out").read_bytes()
    assert (tmp_path / "one.out").stat().st_mode & 0o777 == 0o755
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """`root`, which needs `always`, and `more` for its extra; those need each other."""
    needs = {
        "root": [
            "Always>=1",
            "more; extra == 'cpu'",
            "never; extra == 'cuda'",
            "elsewhere; sys_platform == 'plan9'",
        ],
        "always": ["other"],
        "more": ["always[loud]", "root"],
        "other": [],
    }
    for name, lines in needs.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        said = "".join(f"Requires-Dist: {line}\n" for line in lines)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{said}")
        (folder / "RECORD").write_text(f"{name}.py,,\n{name}/__pycache__/a.pyc,,\n../../bin/{name},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Distribution.from_name("root")


def test_the_closure_is_what_is_needed_with_the_extras(installed: Distribution) -> None:
    def names(*extras: str) -> list[str]:
        return [each.metadata["Name"] for each in closure.closure(installed, frozenset(extras))]

    assert names() == ["root", "always", "other"]
    assert names("cpu") == ["root", "always", "more", "other"]
    with pytest.raises(closure.NotInstalled, match="never, which root needs, is not installed"):
        names("cuda")


def test_scripts_and_what_python_wrote_are_no_files_of_it(installed: Distribution) -> None:
    assert [place for _, place in closure.files(installed)] == [PurePosixPath("root.py")]


@pytest.mark.parametrize(
    ("place", "belongs"),
    [
        ("server/web/index.html", True),
        ("transformers/models/gpt2/tokenization_gpt2.py", True),
        ("transformers/models/gpt2/modeling_gpt2.py", False),
        ("transformers/models/auto/modeling_auto.py", True),
        ("transformers/modeling_utils.py", True),
        ("mlx/include/mlx/array.h", False),
        ("mlx/lib/libmlx.so", True),
        ("numpy/tests/test_all.py", False),
        ("editable.pth", False),
    ],
)
def test_what_runs_belongs_to_it(place: str, belongs: bool) -> None:
    assert tree.belongs(PurePosixPath(place)) == belongs


@pytest.mark.parametrize("name", ["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"])
def test_the_c_library_is_the_machines(name: str) -> None:
    assert libraries.GLIBC.fullmatch(name)


@pytest.mark.parametrize("name", ["libcrypt.so.1", "libstdc++.so.6", "libcrypto.so.3", "libmlx.so"])
def test_no_other_library_is(name: str) -> None:
    assert not libraries.GLIBC.fullmatch(name)
