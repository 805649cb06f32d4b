"""What `run` and `chat` make of files, templates and sessions."""

import json
import os
import threading
from pathlib import Path

import pytest

from mlxcel_cli import config, transcript
from tests.cli.double import Double

REVIEW = """
system = "Be $mood."
prompt = "Look:\\n$input"
model = "other"
defaults = {mood = "kind"}
options = {temp = 0.5}
"""


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """The folder of templates, with one in it."""
    folder = config.templates_dir()
    folder.mkdir(parents=True)
    (folder / "review.toml").write_text(REVIEW)
    (folder / "hi.toml").write_text('prompt = "Say hi."\n')
    (folder / "brief.toml").write_text('system = "Be brief."\n')
    return folder


def asked(double: Double) -> list[list[str]]:
    """The texts of each request."""
    return [[message["content"] for message in body["messages"]] for _, body in double.asked]


def test_files_stand_before_the_prompt_and_stdin_behind_it(double, address, mlxcel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b").write_text("two")
    ended = mlxcel("run", "--server", address, "-f", "a.py", "--file", "b", "-p", "Why?", stdin=b"piped\n")
    assert (ended.code, ended.out, ended.err) == (0, "Hello\n", "")
    mlxcel("run", "--server", address, "-f", "b")
    quotes = ["a.py:\n```\nx = 1\n```\n\nb:\n```\ntwo\n```\n\nWhy?\n\npiped", "b:\n```\ntwo\n```"]
    assert asked(double) == [[quote] for quote in quotes]


def test_a_file_may_be_a_pipe(double, address, mlxcel, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writing = threading.Thread(target=(tmp_path / "pipe").write_text, args=("piped\n",))
    writing.start()
    assert mlxcel("run", "--server", address, "-f", str(tmp_path / "pipe"), "-p", "Why?").code == 0
    writing.join()
    assert asked(double) == [[f"{tmp_path / 'pipe'}:\n```\npiped\n```\n\nWhy?"]]


def test_a_file_that_is_none_ends_the_command_before_a_model_is_loaded(mlxcel):
    ended = mlxcel("run", "-m", "nonesuch", "-f", "missing", "-p", "hi")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: missing cannot be read: No such file or directory\n"


def test_a_template_gives_what_flags_do_not(templates, double, address, mlxcel):
    assert mlxcel("run", "--server", address, "--template", "review", "-p", "x = 1").code == 0
    flags = ("--param", "mood=stern", "--temp", "1", "-m", "mine")
    assert mlxcel("run", "--server", address, "--template", "review", *flags, stdin=b"y = 2\n").code == 0
    first, second = (body for _, body in double.asked)
    assert asked(double) == [["Be kind.", "Look:\nx = 1"], ["Be stern.", "Look:\ny = 2"]]
    assert (first["model"], first["temperature"]) == ("other", 0.5)
    assert (second["model"], second["temperature"]) == ("mine", 1.0)
    assert mlxcel("run", "--server", address, "--template", "review", "-s", "Mine.", "-p", "x").code == 0
    assert asked(double)[-1][0] == "Mine."


def test_what_cuts_an_answer_is_named_where_it_was_said(templates, double, address, mlxcel):
    (templates / "short.toml").write_text('system = "Be brief."\n[options]\nmax_tokens = 2\n')
    double.finish_reason = "length"
    for command in ("run", "chat"):
        ended = mlxcel(command, "--server", address, "--template", "short", stdin=b"hi\n")
        assert ended.err.startswith("(cut at 2 tokens by template short: max_tokens 2; without it ")
        flagged = mlxcel(command, "--server", address, "--template", "short", "-n", "2", stdin=b"hi\n")
        assert flagged.err.startswith("(cut at 2 tokens by --max-tokens 2; without it ")


def test_a_template_that_says_all_needs_no_prompt(templates, double, address, mlxcel):
    assert mlxcel("run", "--server", address, "--template", "hi").code == 0
    assert mlxcel("run", "--server", address, "--template", "hi", "-p", "To Ann.").code == 0
    assert asked(double) == [["Say hi."], ["Say hi.\n\nTo Ann."]]


def test_a_chat_takes_a_templates_system_prompt(templates, double, address, mlxcel):
    assert mlxcel("chat", "--server", address, "--template", "brief", stdin=b"one\n").code == 0
    assert asked(double) == [["Be brief.", "one"]]


def test_what_is_saved_as_a_template_is_used(double, address, mlxcel):
    ended = mlxcel("run", "-s", "Be kind.", "-p", "Look: $input", "--top-k", "5", "--save-template", "mine")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"(written to {config.templates_dir() / 'mine.toml'})\n"
    assert mlxcel("run", "--server", address, "--template", "mine", "-p", "x").code == 0
    assert asked(double) == [["Be kind.", "Look: x"]]
    assert double.asked[0][1]["top_k"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["run", "--template", "reviw", "-p", "x"], 1, "there is no template "),
        (["run", "--template", "review"], 2, "there is no prompt: stdin is empty"),
        (["run", "--template", "review", "-p", "x", "--param", "moot=x"], 1, "template review has no $moot"),
        (["run", "--template", "review", "-p", "x", "--param", "mood"], 2, "--param mood: no variable and text"),
        (["run", "-p", "x", "--param", "a=b"], 2, "--param is for a template"),
        (["chat", "--template", "review"], 2, "template review has a prompt of its own"),
        (["run", "--save-template", "x"], 2, "there is nothing to keep"),
        (["run", "-p", "x", "-f", "y", "--save-template", "x"], 2, "--file is not kept in a template"),
        (["run", "-p", "x", "--save-template", "review"], 1, "/"),
        (["run", "-p", "x", "--save-template", "../e"], 2, "'../e' is no name of a template"),
        (["run", "-p", "x", "--template", "../e"], 2, "'../e' is no name of a template"),
        (["chat", "--template", ""], 2, "'' is no name of a template"),
        (["run", "-p", "x", "--save-template", ""], 2, "'' is no name of a template"),
        (["chat", "--session", "a", "--continue"], 2, "--session and --continue name two chats"),
        (["chat", "--session", "a", "--no-session"], 2, "--no-session keeps nothing"),
        (["run", "-p", "x", "--continue", "--no-session"], 2, "--no-session keeps nothing"),
        (["chat", "--session", "../a"], 1, "'../a' is no name of a session"),
        (["chat", "--continue"], 1, "there is no chat to continue"),
    ],
)
def test_what_does_not_do_is_refused_before_a_model_is_loaded(arguments, code, error, templates, mlxcel):
    ended = mlxcel(*arguments)
    assert (ended.code, ended.out) == (code, "")
    first, second = ended.err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")


def test_a_session_goes_on_from_one_command_to_the_next(double, address, mlxcel):
    first = mlxcel("chat", "--server", address, "--session", "work", "-s", "brief", stdin=b"one\n")
    assert first.err == "(session work: new)\n"
    second = mlxcel("chat", "--server", address, "--session", "work", stdin=b"two\n")
    assert second.err == '(session work of just now: 1 turn, the last "one", system prompt "brief")\n'
    third = mlxcel("run", "--server", address, "--continue", "-p", "three", "-s", "long")
    assert third.out == "Hello\n"
    said = [message["content"] for message in transcript.read(config.sessions_dir() / "work.json")]
    assert said == ["long", "one", "Hello", "two", "Hello", "three", "Hello"]
    assert asked(double)[-1] == said[:-1]


def test_what_is_piped_is_not_kept_unasked(address, mlxcel):
    assert mlxcel("chat", "--server", address, stdin=b"one\n").code == 0
    assert mlxcel("run", "--server", address, "-p", "one").code == 0
    assert not config.sessions_dir().exists()


def test_json_that_was_cut_is_a_failure_to_scripts(double, address, mlxcel, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"type": "object"}))
    flags = ("--server", address, "-p", "hi", "--json-schema", str(tmp_path / "s.json"))
    assert mlxcel("run", *flags).code == 0
    double.finish_reason = "length"
    ended = mlxcel("run", *flags)
    assert (ended.code, ended.out) == (1, "Hello\n")
    assert "error: the answer was cut before its JSON was whole\nhint: " in ended.err
