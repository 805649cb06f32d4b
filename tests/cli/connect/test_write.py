"""A file is replaced in one step, and what it held is kept."""

import stat
from pathlib import Path

import pytest

from engine.errors import UserError
from mlxcel_cli.connect import write as writing
from mlxcel_cli.connect.write import write


def test_a_new_file_is_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "below" / "it.json"
    assert write(path, "new", before=None) is None
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_what_was_there_is_kept_each_time_and_the_mode_stays(tmp_path: Path):
    path = tmp_path / "it.json"
    path.write_text("first")
    path.chmod(0o640)
    assert write(path, "second", before="first") == tmp_path / "it.json.bak"
    assert write(path, "third", before="second") == tmp_path / "it.json.bak1"
    assert [(tmp_path / name).read_text() for name in ("it.json.bak", "it.json.bak1")] == ["first", "second"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path: Path):
    real = tmp_path / "real.json"
    real.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write(link, "new", before="old")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "it.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, "new", before="old")
    assert path.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["it.json"]


def test_what_is_no_text_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "it.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "\ud800", before="old")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["it.json"]


def test_line_ends_are_written_as_they_are(tmp_path: Path):
    write(tmp_path / "it.yml", "a: 1\r\nb: 2\r\n", before=None)
    assert (tmp_path / "it.yml").read_bytes() == b"a: 1\r\nb: 2\r\n"


@pytest.mark.parametrize(("before", "now"), [("old", "other"), ("old", None), (None, "other"), (None, "")])
def test_what_was_changed_meanwhile_is_left_as_it_is(tmp_path: Path, before: str | None, now: str | None):
    path = tmp_path / "it.json"
    if now is not None:
        path.write_text(now)
    with pytest.raises(UserError, match=r"it\.json was changed meanwhile: nothing is written"):
        write(path, "new", before=before)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if now is None else [now])
