"""The program at a pseudo-terminal: what is typed, and every byte that was written."""

import os
import pty
import re
import select
import subprocess
import sys
import termios

PATIENCE_S = 20.0
PROGRAM = [sys.executable, "-c", "from mlxcel_cli.main import main; main()"]
# The pseudo-terminal becomes the process's own, so that Ctrl-C there is a signal.
AT_TERMINAL = [sys.executable, "-c", "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + PROGRAM[-1]]
MOVES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """A process at a pseudo-terminal, and what it wrote there: `all` of it, and `raw` since the last wait."""

    def __init__(self, arguments: list[str], environment: dict[str, str], **streams: int) -> None:
        self._ours, theirs = pty.openpty()
        self.raw = self.all = b""
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
        self.raw = self.text[at:]

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def send(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    @property
    def echoes(self) -> bool:
        """Whether it shows what is typed."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

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
        self.all += piece
        return bool(piece)
