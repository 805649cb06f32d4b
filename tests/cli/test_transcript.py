"""A conversation's file: whole or not there, and refused in one line where it is something else."""

import json
import os
import stat

import pytest

from engine.errors import UserError
from mlxcel_cli import transcript

SYSTEM = {"role": "system", "content": "Be brief.\nAlways."}
TURN = [{"role": "user", "content": "é\U0001f600"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize("messages", [[], [SYSTEM], TURN, [SYSTEM, *TURN, *TURN]], ids=len)
def test_what_is_written_is_read(messages, tmp_path):
    transcript.write(tmp_path / "a", messages, replaces=False)
    assert transcript.read(tmp_path / "a") == messages
    assert json.loads((tmp_path / "a").read_text("utf-8")) == {"messages": messages}


def test_it_is_its_owners_alone_and_leaves_nothing_beside_it(tmp_path):
    transcript.write(tmp_path / "a", TURN, replaces=False)
    transcript.write(tmp_path / "a", [], replaces=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("replaces", [False, True])
def test_what_cannot_be_written_leaves_what_was_there(replaces, tmp_path):
    if replaces:
        (tmp_path / "a").write_text("before")
    with pytest.raises(UserError, match="cannot be written"):
        transcript.write(tmp_path / "a", [{"role": "user", "content": "\ud800"}], replaces=replaces)
    assert [path.read_text() for path in tmp_path.iterdir()] == (["before"] if replaces else [])
    with pytest.raises(UserError, match="cannot be written"):
        transcript.write(tmp_path / "no folder" / "a", TURN, replaces=replaces)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_folder_is_not_overwritten(replaces, tmp_path):
    with pytest.raises(UserError):
        transcript.write(tmp_path, TURN, replaces=replaces)


def said(*messages) -> str:
    return json.dumps({"messages": messages})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", 'it is no object with "messages"'),
        ('{"messages": 1}', 'it is no object with "messages"'),
        (said(1), "message 1 should be a text of the user's"),
        (said(TURN[1]), "message 1 should be a text of the user's"),
        (said(SYSTEM, SYSTEM), "message 2 should be a text of the user's"),
        (said(*TURN, TURN[1]), "message 3 should be a text of the user's"),
        (said(TURN[0], SYSTEM), "message 2 should be a text of the assistant's"),
        (said({"role": "user", "content": None}), "message 1 should be a text of the user's"),
        (said({**TURN[0], "name": "x"}, TURN[1]), "message 1 should be a text of the user's"),
        (said(TURN[0]), "its last question has no answer"),
        (said(TURN[0], {**TURN[1], "content": "a\ud83d"}), "message 2 is not UTF-8 text: half of a character, "),
        (said({**SYSTEM, "content": "\udcff"}), "message 1 is not UTF-8 text: byte 0xff at 0"),
    ],
)
def test_a_file_that_holds_something_else(text, error, tmp_path):
    (tmp_path / "a").write_text(text)
    with pytest.raises(UserError, match="holds no conversation: ") as raised:
        transcript.read(tmp_path / "a")
    assert error in str(raised.value)


def test_a_file_that_is_no_text_or_no_file(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "a", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="cannot be read"):
            transcript.read(path)


def test_a_pipe_is_no_conversation_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UserError, match="a is no file that ends"):
        transcript.read(tmp_path / "a")
    with pytest.raises(UserError, match="exists already"):
        transcript.write(tmp_path / "a", TURN, replaces=False)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    for replaces in (False, True):
        with pytest.raises(UserError, match="cannot be written: embedded null byte"):
            transcript.write(tmp_path / "a\0b", TURN, replaces=replaces)
    with pytest.raises(UserError, match="cannot be read: embedded null byte"):
        transcript.read(tmp_path / "a\0b")
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_will_do(tmp_path):
    transcript.write(tmp_path / ("a" * 255), TURN, replaces=False)
    assert transcript.read(tmp_path / ("a" * 255)) == TURN


def test_a_file_too_large_to_be_a_conversation_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(transcript.MOST_BYTES + 1)
    with pytest.raises(UserError, match="a is too large: it may have 64"):
        transcript.read(tmp_path / "a")


def test_a_link_to_nothing_is_told_and_left(tmp_path):
    (tmp_path / "a").symlink_to("nothing")
    with pytest.raises(UserError, match="a cannot be written: it is a link to a file that is not there"):
        transcript.write(tmp_path / "a", TURN, replaces=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
