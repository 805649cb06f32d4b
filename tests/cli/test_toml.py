"""TOML is read, and whatever else a file may be is one error that names it."""

import os

import pytest

from engine.errors import UserError
from mlxcel_cli import config, templates, toml


def test_what_a_file_says(tmp_path):
    (tmp_path / "a").write_text("a = [9223372036854775807, -9223372036854775808]\nb.c = 'text'\n")
    assert toml.read(tmp_path / "a", "it") == {"a": [2**63 - 1, -(2**63)], "b": {"c": "text"}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a = ", "Invalid value"),
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "{a = " * 5000, "nested too deeply"),
        ("a = " + "1" * 5000, "a number is too large"),
        ("a = 0x" + "f" * 5000, "a number is too large"),
        ("a = [{b = 9223372036854775808}]", "a number is too large"),
    ],
    ids=range(6),
)
def test_what_is_not_toml_is_one_error_wherever_it_stands(text, error, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"the config file {path} is not TOML: .*{error}"):
        config.settle({}, file=path)
    assert [remark.is_error for remark in config.remarks(path, {})] == [True]
    with pytest.raises(UserError, match=f"the template {path} is not TOML: .*{error}"):
        templates.read("a", tmp_path)


def test_what_does_not_end_or_is_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UserError, match=f"the config file {tmp_path / name} is no file that ends"):
            config.settle({}, file=tmp_path / name)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(toml.MOST_BYTES + 1)
    with pytest.raises(UserError, match=r"large is too large: it may have 16\.0 MB"):
        config.settle({}, file=tmp_path / "large")


def test_what_cannot_be_read_is_told_without_numbers(tmp_path):
    (tmp_path / "a").write_bytes(b"a = '\xff'")
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "a", "utf"),
    ):
        with pytest.raises(UserError, match="it cannot be read: ") as raised:
            toml.read(path, "it")
        assert why in str(raised.value)
        assert "Errno" not in str(raised.value)
