"""Messages typed at a terminal. prompt_toolkit is known here and nowhere else."""

import os
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import Output, create_output

from mlxcel_cli import render
from mlxcel_cli.lines import CONTINUED, PROMPT, is_open, unquoted

HOW_TO_LEAVE = "(/bye or Ctrl-D leaves)"


class Keyboard:
    """Messages typed at a terminal, with line editing and a history that outlives the session.

    A bracketed paste is one message. Ctrl-C clears the line, Ctrl-D on an empty line leaves. The line is drawn on
    `output`: by default the terminal behind stdout, else the one behind stderr.
    """

    def __init__(self, history: History, output: Output | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            history=history,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation=CONTINUED,
            output=output or create_output(always_prefer_tty=True),
        )

    async def read(self) -> str | None:
        while True:
            try:
                return unquoted(await self._session.prompt_async())
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    render.note(HOW_TO_LEAVE)
            except EOFError:
                return None


def kept_history(path: Path, *, warn: Callable[[str], None]) -> History:
    """The history in the file at `path`, which only its owner may read; one in memory where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        warn(f"history is not kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))
