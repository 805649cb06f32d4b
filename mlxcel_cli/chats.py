"""Where chats are kept for another day: a folder with a file for each, named by the person or by the clock.

Its files are those of `/save`. A chat is written after every change, and never over what another program wrote:
whoever looks at the folder to write there has it for itself meanwhile.
"""

import datetime
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import UserError
from mlxcel_cli import transcript
from mlxcel_cli.transcript import Message

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
SUFFIX = ".json"
FORMS = "a name has letters, digits and . _ - alone"


class Kept:
    """One chat, as it is kept. Without a name it gets one from the clock when it is first written."""

    def __init__(self, folder: Path, name: str | None = None, *, now: Callable[[], datetime.datetime]) -> None:
        self._folder = folder
        self._now = now
        self.name = name
        self.messages: list[Message] = []
        self.written_s: float | None = None
        self._seen: tuple[int, int] | None = None
        if name is not None and (seen := self._state()) is not None:
            self.messages, self._seen = transcript.read(self._path), seen

    @property
    def _path(self) -> Path:
        assert self.name is not None, "what is read or written has a name"
        return self._folder / f"{self.name}{SUFFIX}"

    def write(self, messages: Sequence[Message]) -> None:
        """Keep `messages`. Nothing happens where that is what is kept already, or where nothing was said yet.

        Raises UserError where they cannot be written, or another chat has written the same file: from then on this
        one has another name.
        """
        said = any(message["role"] != "system" for message in messages)
        if self.is_kept(messages) or not (said or self._seen):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"{self._folder} cannot be made: {error}") from None
        with _alone_in(self._folder):
            taken = self.name if self.name is not None and self._state() != self._seen else None
            if self.name is None or taken:
                self.name, self._seen = self._free_name(), None
            transcript.write(self._path, messages, replaces=self._seen is not None)
            self.messages, self._seen = list(messages), self._state()
        if taken:
            raise UserError(f"another chat wrote session {taken}", hint=f"this one is session {self.name} now")

    def is_kept(self, messages: Sequence[Message]) -> bool:
        """Whether that is what is kept now."""
        return list(messages) == self.messages

    def anew(self) -> "Kept":
        """Another chat, without a name yet."""
        return Kept(self._folder, now=self._now)

    def _state(self) -> tuple[int, int] | None:
        """Which file is there now; None for none. Raises UserError where that cannot be told."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{self._path} cannot be read: {error.strerror}") from None
        self.written_s = found.st_mtime
        return found.st_ino, found.st_mtime_ns

    def _free_name(self) -> str:
        name = self._now().strftime("%Y-%m-%d-%H%M%S")
        number = 2
        free = name
        while os.path.lexists(self._folder / f"{free}{SUFFIX}"):
            free, number = f"{name}-{number}", number + 1
        return free


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Others that ask for `folder` wait meanwhile. Where the file system knows no locks, nobody waits."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def kept(folder: Path, name: str | None, *, goes_on: bool = False) -> Kept:
    """The chat called `name` in `folder`, begun where there is none; without a name, a new one.

    `goes_on`: the one that was written last, of those in which something was said. Raises UserError for a name
    that is none, and where nothing is kept.
    """
    if goes_on:
        for written in names(folder):
            found = Kept(folder, written, now=datetime.datetime.now)
            if any(message["role"] != "system" for message in found.messages):
                return found
        raise UserError("there is no chat to continue", hint=f"every chat at a terminal is kept in {folder}")
    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of a session", hint=FORMS)
    return Kept(folder, name, now=datetime.datetime.now)


def names(folder: Path) -> list[str]:
    """The chats that are kept, the last written first."""
    written = []
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        with suppress(OSError):  # a link to nothing, or gone meanwhile
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                written.append((found.st_mtime_ns, path.name.removesuffix(SUFFIX)))
    return [name for _, name in sorted(written, reverse=True)]
