"""The program at a real terminal: a pseudo-terminal, and a server double that answers."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cli.double import Double

PATIENCE_S = 20.0
PROGRAM = [sys.executable, "-c", "from mlxcel_cli.main import main; main()"]
# The pseudo-terminal becomes the process's own, so that Ctrl-C there is a signal.
AT_TERMINAL = [sys.executable, "-c", "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + PROGRAM[-1]]
CTRL_C, CTRL_D = b"\x03", b"\x04"
MOVES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """A process at a pseudo-terminal, and what it has written there."""

    def __init__(self, arguments: list[str], environment: dict[str, str], **streams: int) -> None:
        self._ours, theirs = pty.openpty()
        self.raw = b""
        self.escapes = 0
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, **streams}
        # This terminal does not answer when it is asked where the cursor is.
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        self._process = subprocess.Popen(
            [*AT_TERMINAL, *arguments], env=environment, start_new_session=True, **streams
        )
        os.close(theirs)

    @property
    def text(self) -> bytes:
        """What was written, without colours and cursor movement."""
        return MOVES.sub(b"", self.raw)

    def wait_for(self, *texts: bytes) -> None:
        """Read until all of `texts` stand there in this order, each after what the last wait saw."""
        at = 0
        for text in texts:
            while (found := self.text.find(text, at)) < 0:
                assert self._read(), f"{text!r} never came: {self.text!r}"
            at = found + len(text)
        self.escapes += self.raw.count(b"\x1b")
        self.raw = self.text[at:]

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def ended(self) -> int:
        """The exit code, after everything was read."""
        while self._read():
            pass
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        assert select.select([self._ours], [], [], PATIENCE_S)[0], f"nothing more came: {self.text!r}"
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.raw += piece
        return bool(piece)


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


def test_ctrl_c_during_run_prints_what_came_and_ends_with_130(double: Double, address, at_terminal):
    double.hold = True
    terminal = at_terminal("run", "-p", "one", "--server", address)
    terminal.wait_for(b"Hello")
    terminal.type(CTRL_C)
    assert terminal.ended() == 130
    assert b"Traceback" not in terminal.text


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
    assert terminal.escapes == 0
    assert double.asked[-1][1]["messages"][-1]["content"] == "two\nlines"


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
        terminal.wait_for(b">>>")
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
