"""Messages typed at a terminal. prompt_toolkit is known here and in `completer`."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.styles import Style
from prompt_toolkit.validation import ValidationError, Validator

from mlxcel_cli import config, render, unicode
from mlxcel_cli.completer import NAME_FILES, SlashCompleter
from mlxcel_cli.lines import CONTINUED, PROMPT, is_open, unquoted

HOW_TO_LEAVE = "(/bye or Ctrl-D leaves)"
MOST_ECHOED_LINES, MOST_ECHOED_LETTERS = 10, 1000
ECHOED_LINES = 3
STYLE = Style.from_dict(
    {
        "bottom-toolbar": "noreverse fg:ansibrightblack",
        "continuation": "fg:ansibrightblack",
        "completion-menu": "noreverse bg:default",
        "completion-menu.completion.current": "reverse",
        "completion-menu.meta.completion": "fg:ansibrightblack bg:default",
        "completion-menu.meta.completion.current": "fg:ansibrightblack bg:default",
    }
)


class Keyboard:
    """Messages typed at a terminal, with line editing and a history that outlives the session.

    A bracketed paste is one message. Ctrl-C clears the line, Ctrl-D on an empty line leaves. The line is drawn on
    `output`: by default the terminal behind stdout, else the one behind stderr.
    """

    edits = True

    def __init__(self, history: History, output: Output | None = None) -> None:
        self._output = output or create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            message=PROMPT,
            history=history,
            multiline=Condition(_is_open),
            prompt_continuation=[("class:continuation", CONTINUED)],
            completer=SlashCompleter(),
            complete_while_typing=Condition(_is_command),
            enable_history_search=Condition(lambda: not _is_command()),
            key_bindings=_keys(),
            validator=_Whole(),
            validate_while_typing=False,
            style=STYLE,
            color_depth=None if config.wants_colour() else ColorDepth.DEPTH_1_BIT,
            output=self._output,
        )

    async def read(self, status: str = "") -> str | None:
        while True:
            try:
                self._session.bottom_toolbar = (lambda: self._fitting(status)) if status else None
                text = await self._session.prompt_async()
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    render.note(HOW_TO_LEAVE)
            except EOFError:
                return None
            else:
                if is_long(text):
                    self._echo(text)
                return unquoted(text)

    def _fitting(self, status: str) -> str:
        """The status, as wide as the terminal is now."""
        return render.shortened(status, self._output.get_size().columns)

    def _echo(self, text: str) -> None:
        """Show the beginning of a message whose lines were taken away when it was sent."""
        lines = text.split("\n")
        shown = [line[: MOST_ECHOED_LETTERS // ECHOED_LINES] for line in lines[:ECHOED_LINES]]
        size = f"{render.count(len(lines), 'line')}, {render.size(len(text.encode()))}"
        for prompt, line in zip((PROMPT, CONTINUED, CONTINUED), shown, strict=False):
            self._output.write(f"{prompt}{line}\n")
        self._output.write(f"{CONTINUED}({size} in all)\n")
        self._output.flush()


class _Whole(Validator):
    """Keeps a message that is no text from being sent: it stays on the line, the cursor where the fault is.

    Names of files may be any bytes.
    """

    def validate(self, document: Document) -> None:
        if not document.text.startswith(NAME_FILES) and (fault := unicode.fault(document.text)) is not None:
            raise ValidationError(fault[0], f"this is not UTF-8 text: {fault[1]}; take it out, or type it anew")


def is_long(text: str) -> bool:
    """Whether a message would fill the screen once more when it is sent."""
    return len(text) > MOST_ECHOED_LETTERS or text.count("\n") >= MOST_ECHOED_LINES


def _is_open() -> bool:
    return is_open(get_app().current_buffer.text)


def _is_command() -> bool:
    return get_app().current_buffer.text.startswith("/")


def _keys() -> KeyBindings:
    """Alt-Enter, which terminals send as Esc and Enter, begins a new line. A long message goes when it is sent."""
    keys = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # and not in a search

    @keys.add("escape", "enter", filter=is_typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=is_typing & ~Condition(_is_open))
    def send(event: KeyPressEvent) -> None:
        event.app.erase_when_done = is_long(event.current_buffer.text)
        event.current_buffer.validate_and_handle()

    return keys


def kept_history(path: Path, *, warn: Callable[[str], None]) -> History:
    """The history in the file at `path`, which only its owner may read; one in memory where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        warn(f"history is not kept: {error}")
        return InMemoryHistory()
    if not is_file:
        warn(f"history is not kept: {path} is no file that ends")
        return InMemoryHistory()
    return _Kept(path, warn)


class _Kept(FileHistory):
    """A history that goes on in memory when its file cannot be written any more."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__(str(path))
        self._warn = warn
        self._fails = False

    def store_string(self, string: str) -> None:
        if self._fails:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._fails = True
            # The line that is being sent is still to be drawn.
            asyncio.get_running_loop().call_soon(self._warn, f"history is not kept any more: {error}")
