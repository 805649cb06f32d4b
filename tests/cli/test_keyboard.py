"""What keys make of a message. Pastes are in tests/replay/test_100_paste."""

import os
import stat

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxcel_cli.keyboard import HOW_TO_LEAVE, Keyboard, is_long, kept_history

pytestmark = pytest.mark.anyio

UP, CTRL_C, CTRL_D, CTRL_R, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x12", "\x1b\r"
DELETE = b"\x1b[3~"


async def typed(keys: str, num_messages: int, history=None) -> list[str | None]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        keyboard = Keyboard(history or InMemoryHistory(), DummyOutput())
        pipe.send_text(keys)
        return [await keyboard.read() for _ in range(num_messages)]


async def test_a_line_is_a_message():
    assert await typed("one\rtwo\r", 2) == ["one", "two"]


async def test_three_quotes_begin_and_end_a_message_of_several_lines():
    assert await typed('"""one\rtwo\r\rthree"""\rnext\r', 2) == ["one\ntwo\n\nthree", "next"]
    assert await typed('"""\rone\r"""\r', 1) == ["one"]
    assert await typed('"""one"""\r', 1) == ["one"]


async def test_ctrl_c_clears_the_line_and_says_how_to_leave_when_it_is_empty(capsys):
    assert await typed(f"half a li{CTRL_C}whole\r", 1) == ["whole"]
    assert capsys.readouterr().err == ""
    assert await typed(f"{CTRL_C}whole\r", 1) == ["whole"]
    assert capsys.readouterr().err == HOW_TO_LEAVE + "\n"


async def test_ctrl_c_ends_an_unfinished_message_of_several_lines():
    assert await typed(f'"""one\rtwo{CTRL_C}next\r', 1) == ["next"]


async def test_ctrl_d_leaves():
    assert await typed(CTRL_D, 1) == [None]


async def test_history_outlives_the_session_and_holds_whole_messages(tmp_path):
    path = tmp_path / "deep" / "history"
    assert await typed('"""one\rtwo"""\r', 1, kept_history(path, warn=print)) == ["one\ntwo"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await typed(f"{UP}\r", 1, kept_history(path, warn=print)) == ["one\ntwo"]


async def test_history_that_cannot_be_kept_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    warned: list[str] = []
    assert await typed("one\r", 1, kept_history(tmp_path / "file" / "history", warn=warned.append)) == ["one"]
    assert "history is not kept" in warned[0]


async def test_a_history_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "history")
    warned: list[str] = []
    assert await typed("one\r", 1, kept_history(tmp_path / "history", warn=warned.append)) == ["one"]
    assert warned == [f"history is not kept: {tmp_path / 'history'} is no file that ends"]


async def test_a_history_that_cannot_be_kept_any_more_says_so_once_and_goes_on(tmp_path):
    path = tmp_path / "history"
    warned: list[str] = []
    history = kept_history(path, warn=warned.append)
    assert await typed("one\r", 1, history) == ["one"]
    path.unlink()
    path.mkdir()
    assert await typed("two\rthree\r", 2, history) == ["two", "three"]
    assert await typed(f"{UP}{UP}\r", 1, history) == ["two"]
    assert len(warned) == 1
    assert "history is not kept any more: " in warned[0]


async def test_alt_enter_begins_a_new_line_and_enter_sends():
    assert await typed(f"one{ALT_ENTER}two\rnext\r", 2) == ["one\ntwo", "next"]
    assert await typed(f'"""one{ALT_ENTER}two"""\r', 1) == ["one\ntwo"]


async def test_the_history_is_searched_by_prefix_and_by_any_part():
    said = ["first one", "second two", "first three"]
    for keys, found in (("s", said[1]), ("first", said[2]), (f"first{UP}", said[0])):
        assert await typed(f"{keys}{UP}\r", 1, InMemoryHistory(said)) == [found]
    assert await typed(f"{CTRL_R}two\r\r", 1, InMemoryHistory(said)) == ["second two"]


async def test_what_is_no_text_is_not_sent_until_it_is_mended():
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        keyboard = Keyboard(InMemoryHistory(), DummyOutput())
        pipe.send_bytes(b"caf\xe9 x\r" + DELETE + "é\r".encode())
        assert await keyboard.read() == "café x"
        pipe.send_bytes(b"/file caf\xe9\r")
        assert await keyboard.read() == "/file caf\udce9"


async def test_the_history_holds_long_messages_whole(tmp_path):
    text = "a line\n" * 2000
    path = tmp_path / "history"
    assert await typed(f"\x1b[200~{text}\x1b[201~\r", 1, kept_history(path, warn=print)) == [text]
    assert await typed(f"{UP}\r", 1, kept_history(path, warn=print)) == [text]


@pytest.mark.parametrize(
    ("text", "long"), [("", False), ("a\n" * 9, False), ("a\n" * 10, True), ("a" * 1001, True)]
)
def test_long_messages_are_those_that_fill_a_screen(text, long):
    assert is_long(text) == long
