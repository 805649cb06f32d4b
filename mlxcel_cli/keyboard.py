"""Messages typed at a terminal. prompt_toolkit is known here and nowhere else."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output

from mlxcel_cli import config, render
from mlxcel_cli.lines import is_open, unquoted

PROMPT, CONTINUED = ">>> ", "... "
HOW_TO_LEAVE = "(/bye or Ctrl-D leaves)"


class Keyboard:
    """Messages typed at a terminal, with line editing and a history that outlives the session.

    A bracketed paste is one message. Ctrl-C clears the line, Ctrl-D on an empty line leaves.
    """

    def __init__(self, history: History) -> None:
        # Drawn on stderr where stdout is redirected; a dumb terminal needs prompt_toolkit's own choice.
        elsewhere = not render.is_terminal(sys.stdout) and not config.is_dumb()
        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            history=history,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation=CONTINUED,
            output=create_output(always_prefer_tty=True) if elsewhere else None,
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
