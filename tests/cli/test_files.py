"""Files in a prompt: their text under their name, or a refusal that names them."""

import os
import threading

import pytest

from engine.errors import UserError
from mlxcel_cli import files
from mlxcel_cli.files import Quote


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("one\ntwo\n", "```\none\ntwo\n```"),
        ("one", "```\none\n```"),
        ("﻿é\U0001f600", "```\né\U0001f600\n```"),
        ("a ```code``` and ````\n", "`````\na ```code``` and ````\n`````"),
    ],
)
def test_a_files_text_stands_under_its_name(text, quoted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt").write_text(text, "utf-8")
    assert str(files.quote("a b.txt")) == f"a b.txt:\n{quoted}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a\0b", "is not text: byte 0x00 at 1"),
        (b"a\xff", "is not UTF-8 text: byte 0xff at 1"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"x" * (files.MOST_BYTES + 1), "is too large: a file may have 1.0 MB"),
    ],
)
def test_what_is_no_text_is_refused_by_name(content, problem, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError) as raised:
        files.quote(str(tmp_path / "file"))
    assert str(raised.value) == f"{tmp_path / 'file'} {problem}"


def test_the_largest_file_is_taken(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * files.MOST_BYTES)
    assert len(files.quote(str(tmp_path / "file")).text) == files.MOST_BYTES


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "missing cannot be read: No such file or directory"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name/x: "),
        ("/", "/ is a folder"),
        ("/dev/zero", "/dev/zero is no file that ends"),
        ("a\0b", "a\0b cannot be read: "),
    ],
)
def test_what_is_no_file_is_refused_by_name(name, problem):
    with pytest.raises(UserError) as raised:
        files.quote(name)
    assert str(raised.value).startswith(problem)


def test_a_name_that_is_no_text_is_part_of_a_prompt_as_far_as_it_is(tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    with open(name, "w") as file:
        file.write("x")
    assert str(files.quote(name)) == f"{tmp_path}/caf\ufffd:\n```\nx\n```"


def test_a_pipe_is_read_only_where_that_may_take_a_while(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    name = str(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no file that ends"):
        files.quote(name)
    writing = threading.Thread(target=(tmp_path / "pipe").write_text, args=("piped\n",))
    writing.start()
    assert str(files.quote(name, may_wait=True)) == f"{name}:\n```\npiped\n```"
    writing.join()


def test_a_pipe_that_nobody_writes_to_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SILENCE_S", 0)
    told = threading.Event()
    said: list[str] = []
    monkeypatch.setattr(files.render, "note", lambda text: (said.append(text), told.set()))
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        told.wait()
        (tmp_path / "pipe").write_text("piped\n")

    writing = threading.Thread(target=write)
    writing.start()
    assert files.quote(str(tmp_path / "pipe"), may_wait=True).text == "piped\n"
    writing.join()
    assert said == [f"waiting for what {tmp_path / 'pipe'} gives"]


def test_a_prompt_comes_behind_its_files():
    assert files.before("Why?", [Quote("a", "x"), Quote("b", "y")]) == "a:\n```\nx\n```\n\nb:\n```\ny\n```\n\nWhy?"
    assert files.before("", [Quote("a", "x")]) == "a:\n```\nx\n```"
    assert files.before("Why?", []) == "Why?"


@pytest.mark.parametrize("prompt", ["Why?", "", "b:\n\ntwo", "a:\n```\n"])
@pytest.mark.parametrize("texts", [[], ["x"], ["```\n\n````\n", "", "b:\n```\n"]], ids=len)
def test_what_was_put_together_is_told_apart(texts, prompt):
    names = [f"{number} name: x" for number in range(len(texts))]
    quotes = [Quote(name, text) for name, text in zip(names, texts, strict=True)]
    assert files.parted(files.before(prompt, quotes)) == (names, prompt)
