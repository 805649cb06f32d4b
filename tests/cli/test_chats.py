"""Chats that are kept: under a name or the clock's, whole, private, and never over what another wrote."""

import datetime
import os
import stat
import threading
from contextlib import suppress

import pytest

from engine.errors import UserError
from mlxcel_cli import chats, transcript
from mlxcel_cli.chats import Kept

SYSTEM = {"role": "system", "content": "Be brief."}
TURN = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello"}]


def at_noon() -> datetime.datetime:
    return datetime.datetime(2030, 1, 2, 12, 0, 0)


def test_a_chat_is_there_again_under_its_name(tmp_path):
    folder = tmp_path / "deep" / "sessions"
    chat = chats.kept(folder, "work")
    assert (chat.messages, chat.written_s) == ([], None)
    chat.write([SYSTEM, *TURN])
    chat.write([SYSTEM, *TURN, *TURN])
    again = chats.kept(folder, "work")
    assert again.messages == [SYSTEM, *TURN, *TURN]
    assert again.written_s == (folder / "work.json").stat().st_mtime
    assert [path.name for path in folder.iterdir()] == ["work.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "work.json").stat().st_mode) == 0o600


def test_what_nobody_said_is_not_kept(tmp_path):
    Kept(tmp_path, now=at_noon).write([])
    Kept(tmp_path, now=at_noon).write([SYSTEM])
    assert list(tmp_path.iterdir()) == []


def test_a_chat_that_was_emptied_stays_empty(tmp_path):
    chat = chats.kept(tmp_path, "work")
    chat.write(TURN)
    chat.write([])
    assert chats.kept(tmp_path, "work").messages == []


def test_without_a_name_the_clock_gives_one(tmp_path):
    for number in range(3):
        chat = Kept(tmp_path, now=at_noon)
        chat.write(TURN * (number + 1))
        chat.write(TURN)
    names = ["2030-01-02-120000", "2030-01-02-120000-2", "2030-01-02-120000-3"]
    assert sorted(chats.names(tmp_path)) == names


def test_the_last_written_is_gone_on_with(tmp_path):
    with pytest.raises(UserError, match="there is no chat to continue"):
        chats.kept(tmp_path / "none", None, goes_on=True)
    for place, name in enumerate(("b", "a", "c")):
        chats.kept(tmp_path, name).write(TURN)
        os.utime(tmp_path / f"{name}.json", (place % 2, place % 2))
    assert chats.names(tmp_path)[0] == "a"
    going_on = chats.kept(tmp_path, None, goes_on=True)
    assert going_on.name == "a"
    going_on.write([])  # as /undo leaves it
    os.utime(tmp_path / "a.json", (2, 2))
    assert (chats.names(tmp_path)[0], chats.kept(tmp_path, None, goes_on=True).name) == ("a", "c")


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", ".a", "a b", "a\n", "é", "x" * 101])
def test_a_name_is_no_path(name, tmp_path):
    with pytest.raises(UserError, match="is no name of a session"):
        chats.kept(tmp_path, name)


def test_what_another_chat_wrote_is_not_written_over(tmp_path):
    first, second = chats.kept(tmp_path, "work"), chats.kept(tmp_path, "work")
    first.write(TURN)
    with pytest.raises(UserError, match="another chat wrote session work"):
        second.write(TURN * 2)
    second.write(TURN * 3)
    assert chats.kept(tmp_path, "work").messages == TURN
    assert second.name is not None
    assert chats.kept(tmp_path, second.name).messages == TURN * 3
    first.write(TURN * 4)
    assert chats.kept(tmp_path, "work").messages == TURN * 4


def test_a_file_that_is_no_chat_is_not_gone_on_with(tmp_path):
    (tmp_path / "work.json").write_text("precious")
    with pytest.raises(UserError, match="holds no conversation"):
        chats.kept(tmp_path, "work")


def test_what_is_no_file_is_no_chat(tmp_path):
    chats.kept(tmp_path, "work").write(TURN)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to("nothing")
    assert chats.names(tmp_path) == ["work"]
    with pytest.raises(UserError, match=r"pipe\.json is no file that ends"):
        chats.kept(tmp_path, "pipe")


def test_a_link_to_nothing_is_told_when_it_is_to_be_written(tmp_path):
    (tmp_path / "link.json").symlink_to("nothing")
    (tmp_path / "2030-01-02-120000.json").symlink_to("nothing")
    with pytest.raises(UserError, match=r"link\.json cannot be written: it is a link to a file that is not there"):
        chats.kept(tmp_path, "link").write(TURN)
    Kept(tmp_path, now=at_noon).write(TURN)
    assert chats.names(tmp_path) == ["2030-01-02-120000-2"]


def test_a_place_that_cannot_be_looked_at_is_told(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(UserError, match=r"loop\.json cannot be read: Too many levels"):
        chats.kept(tmp_path, "loop")
    chat = chats.kept(tmp_path, "work")
    chat.write(TURN)
    (tmp_path / "work.json").unlink()
    (tmp_path / "work.json").symlink_to("work.json")
    with pytest.raises(UserError, match=r"work\.json cannot be read: Too many levels"):
        chat.write(TURN * 2)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        chats.kept(tmp_path / "file" / "sessions", "work").write(TURN)


def test_another_chat_begins_without_touching_the_first(tmp_path):
    chat = Kept(tmp_path, "work", now=at_noon)
    chat.write(TURN)
    chat.anew().write(TURN * 2)
    assert transcript.read(tmp_path / "work.json") == TURN
    assert transcript.read(tmp_path / "2030-01-02-120000.json") == TURN * 2


def test_of_two_that_write_at_once_neither_loses_a_turn(tmp_path, monkeypatch):
    both, write = threading.Barrier(2), transcript.write

    def slow(*said, **how):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # for the other one to have looked as well
        write(*said, **how)

    def says(chat: Kept, text: str) -> None:
        with suppress(UserError):  # that the other one has the name
            chat.write([*chat.messages, {"role": "user", "content": text}, TURN[1]])

    chats.kept(tmp_path, "work").write(TURN)
    monkeypatch.setattr(transcript, "write", slow)
    texts = ("from here", "from there")
    writers = [threading.Thread(target=says, args=(chats.kept(tmp_path, "work"), text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    said = [turn["content"] for name in chats.names(tmp_path) for turn in chats.kept(tmp_path, name).messages]
    assert set(texts) <= set(said)
    assert len(list(tmp_path.iterdir())) == 2
