"""The program at a real terminal: a pseudo-terminal, and a server double that answers."""

import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.double import Double
from tests.cli.terminal import PROGRAM, Terminal

CTRL_C, CTRL_D = b"\x03", b"\x04"
PASTES_ON, PASTES_OFF = b"\x1b[?2004h", b"\x1b[?2004l"


@pytest.fixture
def at_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, **streams: int) -> Terminal:
        opened.append(Terminal(list(arguments), environment or {}, **streams))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(double: Double, address, at_terminal):
    double.hold = True
    terminal = at_terminal("chat", "--server", address)
    terminal.wait_for(b"double: /help", b">>>")
    terminal.type(b"one\r")
    terminal.wait_for(b"Hello")
    terminal.type(CTRL_C)
    terminal.wait_for(b"stopped", b">>>")
    double.hold = False
    terminal.type(b"two\r")
    terminal.wait_for(b"Hello\r\n", b">>>")
    terminal.type(b"half a line" + CTRL_C)
    terminal.wait_for(b"half a line", b">>>")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert [body["messages"] for _, body in double.asked] == [
        [{"role": "user", "content": t}] for t in ("one", "two")
    ]


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}], ids=str)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answers", [False, True])
def test_a_chat_that_is_ended_leaves_the_terminal_as_it_was(
    answers, number, environment, double: Double, address, at_terminal
):
    double.hold = True
    terminal = at_terminal("chat", "--server", address, environment=environment)
    terminal.wait_for(b">>>")
    if answers:
        terminal.type(b"one\r")
        terminal.wait_for(b"Hello")
        assert not terminal.echoes
    terminal.send(number)
    assert terminal.ended() == -number
    assert terminal.echoes
    assert terminal.all.rfind(PASTES_ON) < terminal.all.rfind(PASTES_OFF) or environment
    assert b"Traceback" not in terminal.all


def test_ctrl_c_during_run_prints_what_came_and_ends_with_130(double: Double, address, at_terminal):
    double.hold = True
    terminal = at_terminal("run", "-p", "one", "--server", address)
    terminal.wait_for(b"Hello")
    terminal.type(CTRL_C)
    assert terminal.ended() == 130
    assert b"Traceback" not in terminal.text
    assert b"(stopped)" in terminal.all


def test_history_is_there_in_the_next_session(address, at_terminal):
    for keys in (b"first\r", b"\x1b[A\x1b[A\r"):  # up, past /bye
        terminal = at_terminal("chat", "--server", address)
        terminal.wait_for(b">>>")
        terminal.type(keys)
        terminal.wait_for(b"first", b"Hello", b">>>")
        terminal.type(b"/bye\r")
        assert terminal.ended() == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_without_colours_no_colour_is_written(environment, address, at_terminal):
    terminal = at_terminal("run", "-p", "one", "--server", address, "--stats", environment=environment)
    assert terminal.ended() == 0
    assert terminal.raw.startswith(b"Hello\r\nprompt: 4 tokens")
    assert b"\x1b" not in terminal.raw


def test_a_dumb_terminal_chats_without_cursor_movement(double: Double, address, at_terminal):
    terminal = at_terminal("chat", "--server", address, environment={"TERM": "dumb"})
    terminal.wait_for(b">>>")
    terminal.type(b"one\r")
    terminal.wait_for(b"Hello", b">>>")
    terminal.type(b"half a line" + CTRL_C + b'"""two\rlines"""\r')
    terminal.wait_for(b"...", b"Hello", b">>>")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert terminal.all.endswith(b">>> \r\n")
    assert b"\x1b" not in terminal.all
    assert double.asked[-1][1]["messages"][-1]["content"] == "two\nlines"


def test_the_help_of_a_dumb_terminal_names_no_key_that_it_has_not(address, at_terminal):
    terminal = at_terminal("chat", "--server", address, environment={"TERM": "dumb"})
    terminal.wait_for(b">>>")
    terminal.type(b"/help\r")
    terminal.wait_for(b"Ctrl-C", b">>>")
    assert b"Alt-Enter" not in terminal.all
    terminal.type(b"/bye\r")
    assert terminal.ended() == 0
    assert terminal.all.endswith(b"/bye\r\n")


def test_control_bytes_of_an_answer_do_not_reach_a_terminal(double: Double, address, at_terminal):
    double.answer = lambda body: ["a\x1b]0;title\x07b\tc\n"]
    terminal = at_terminal("run", "-p", "one", "--server", address)
    assert terminal.ended() == 0
    assert terminal.raw.startswith(b"a\\x1b]0;title\\x07b\tc\r\n")


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)


def test_a_redirected_chat_keeps_its_answers_apart_from_its_prompt(address, at_terminal):
    with _pipe() as (reader, writer):
        terminal = at_terminal("chat", "--server", address, stdout=writer)
        os.close(writer)
        terminal.wait_for(b">>>")
        terminal.type(b"one\r")
        terminal.wait_for(b"one\r", b"\n", b">>>")  # the line may be drawn again, prompt and all, before it ends
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        with open(reader, "rb", closefd=False) as data:
            assert data.read() == b"Hello\n"


@pytest.mark.parametrize(
    ("target", "error"), [(">&-", "stdout is closed"), ("> /dev/full", "[Errno 28] No space left on device")]
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line(target, error, address):
    shell = ["sh", "-c", f'exec "$@" {target}', "sh", *PROGRAM, "run", "-p", "one", "--server", address]
    ended = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {error}")
    assert ended.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_traceback(double: Double, address, tmp_path):
    double.answer = lambda body: ["line\n"] * 20_000
    command = [*PROGRAM, "run", "-p", "one", "--server", address]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("keys", "code"),
    [(b"y\r", 0), (b"what\rYES\r", 0), (b"n\r", 1), (b"\r", 1), (CTRL_D, 1), (CTRL_C, 130)],
    ids=["y", "yes", "n", "empty", "end", "ctrl-c"],
)
def test_a_question_is_answered_by_yes_alone(address, at_terminal, tmp_path: Path, keys: bytes, code: int):
    file = tmp_path / "it.yml"
    terminal = at_terminal("connect", "aider", "--server", address, "--write", "--file", str(file))
    terminal.wait_for(b"it.yml? [y/N]: ")
    terminal.type(keys)
    assert terminal.ended() == code
    assert b"Traceback" not in terminal.text
    assert file.exists() == (code == 0)


def test_the_name_of_a_model_does_not_reach_a_terminal_as_control_bytes(double: Double, address, at_terminal):
    double.listed = [{"id": "\x1b]0;pwn\x07evil\x1b[2J\nx"}]
    terminal = at_terminal("chat", "--server", address)
    terminal.wait_for(rb"\x1b]0;pwn\x07evil\x1b[2J", b"x: /help", b">>>")
    terminal.type(b"one\r")
    terminal.wait_for(b"Hello\r\n", b">>>")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert b"\x1b]0;pwn" not in terminal.all
    assert b"\x1b[2J" not in terminal.all


def test_a_chat_whose_answers_have_nowhere_to_go_is_an_error(double: Double, address):
    ours, theirs = pty.openpty()
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, "chat", "--server", address]
    ended = subprocess.run(shell, stdin=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(ours)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (1, "error: stdout is closed: there is nowhere to write to\n")
    assert not double.asked
