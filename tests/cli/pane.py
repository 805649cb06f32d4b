"""The program in a pane of tmux: a real terminal, whose screen can be looked at."""

import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cli.terminal import PATIENCE_S, PROGRAM

READ_BYTES = 65536


class Pane:
    """A pane of a tmux server of its own. `raw` is every byte that the program wrote."""

    def __init__(
        self, command: str, environment: Mapping[str, str], *, columns: int = 80, lines: int = 24
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pane", dir="/tmp")
        self._tmux = ["tmux", "-S", f"{self._folder.name}/socket", "-f", os.devnull]
        self.raw = b""
        fifo = Path(self._folder.name) / "written"
        os.mkfifo(fifo)
        self._written = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        # The program begins when somebody reads what it writes.
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        script = f"{shlex.join(self._tmux)} wait-for read; exec env {variables} {command}"
        size = ("-x", str(columns), "-y", str(lines))
        limit = ("set", "-g", "history-limit", "20000", ";", "set", "-g", "remain-on-exit", "on", ";")
        self._say("start-server", ";", *limit, "new-session", "-d", *size, "sh", "-c", script)
        self._say("pipe-pane", "-O", f"cat > {fifo}")
        self._say("wait-for", "-S", "read")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Return when `text` stands on the screen or above it, so many times."""
        while self.text.count(text) < times:
            assert select.select([self._written], [], [], PATIENCE_S)[0], f"{text!r} never came:\n{self.text}"
            self.raw += os.read(self._written, READ_BYTES)

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names or as text."""
        self._say("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste `text` as terminals do, between marks where the program asked for them."""
        file = Path(self._folder.name) / "paste"
        file.write_text(text)
        self._say("load-buffer", str(file), ";", "paste-buffer", "-p", "-r")

    def resize(self, columns: int, lines: int) -> None:
        """Return when the program could know of it: tmux tells it a little later."""
        terminal = self._say("display-message", "-p", "#{pane_tty}").strip()
        self._say("resize-window", "-x", str(columns), "-y", str(lines))
        until_s = time.monotonic() + PATIENCE_S
        with open(terminal) as opened:
            while os.get_terminal_size(opened.fileno()) != (columns, lines):
                assert time.monotonic() < until_s, "the program was never told its size"

    @property
    def text(self) -> str:
        """What stands on the screen and above it; lines that were wrapped are whole."""
        return self._say("capture-pane", "-p", "-J", "-S", "-").rstrip()

    @property
    def screen(self) -> str:
        """What stands on the screen, with its colours."""
        return self._say("capture-pane", "-p", "-e").rstrip()

    def close(self) -> None:
        self._say("kill-server")
        os.close(self._written)
        self._folder.cleanup()

    def _say(self, *words: str) -> str:
        ended = subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True)
        return ended.stdout


def program(*arguments: str) -> str:
    """The shell's words for the program with these arguments."""
    return shlex.join([*PROGRAM, *arguments])
