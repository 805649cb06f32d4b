"""Tables, sizes, progress, errors and hints as terminal text.

stdout is data, stderr is talk. Colour and cursor movement are used only where the stream is a terminal and the
person allows it. This module does not know what is said.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from engine.errors import MlxcelError, UserError
from mlxcel_cli import config

REDRAW_S = 0.1
BAR_CELLS = 24
# What a terminal would act on, shown instead: a text must not move the cursor or set the window's title.
SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
SHOWN_CONTROLS[ord("\r")] = ""
DOTS = "..."
RED, CYAN, DIM, PLAIN = "\x1b[31m", "\x1b[36m", "\x1b[2m", "\x1b[0m"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is open and leads to a terminal."""
    with suppress(ValueError, AttributeError):
        return stream is not None and stream.isatty()
    return False


def harmless(text: str) -> str:
    """`text` with what a terminal would act on, or no file could hold, written out."""
    return text.translate(SHOWN_CONTROLS).encode("utf-8", "backslashreplace").decode()


def terminal_size(stream: TextIO) -> os.terminal_size:
    """The size now of the terminal behind `stream`; the one that the environment tells is that of the start."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()


def say(text: str, *, colour: str = "") -> None:
    """One line of talk."""
    if sys.stderr is None:
        return
    if colour and is_terminal(sys.stderr) and config.wants_colour():
        text = f"{colour}{text}{PLAIN}"
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """A remark that can be overlooked. On a terminal it is broken between words."""
    if is_terminal(sys.stderr):
        text = wrapped(text, terminal_size(sys.stderr).columns)
    say(text, colour=DIM)


def error(problem: str, hint: str = "") -> None:
    """What went wrong in one line, and what to do next in another."""
    say("error: " + harmless(" ".join(problem.split())), colour=RED)
    if hint:
        say(f"hint: {harmless(hint)}", colour=CYAN)


def failure(problem: MlxcelError) -> None:
    """The error and hint lines of an exception."""
    error(str(problem) or type(problem).__name__, problem.hint)


def aside(text: str) -> None:
    """Talk in pieces, dimmed like a note."""
    if sys.stderr is None:
        return
    if is_terminal(sys.stderr) and config.wants_colour():
        text = f"{DIM}{text}{PLAIN}"
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def prompt(text: str) -> None:
    """Talk that waits for an answer on the same line."""
    if sys.stderr is None:
        return
    sys.stderr.write(text)
    sys.stderr.flush()


def confirmed(question: str) -> bool:
    """Whether the person at stdin says yes; an empty line or the end of input is a no."""
    while True:
        prompt(f"{question} [y/N]: ")
        line = sys.stdin.buffer.readline()
        answer = line.strip().lower()
        if answer in (b"y", b"yes"):
            return True
        if answer in (b"", b"n", b"no"):
            if not line:
                say("")  # the question's line is still open
            return False
        say("answer y or n")


def put(text: str) -> None:
    """Data: to stdout as it is, at once. Raises OSError where it cannot be written."""
    if sys.stdout is None:
        raise UserError("stdout is closed: there is nowhere to write to")
    sys.stdout.write(text)
    sys.stdout.flush()


def table(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """`rows`, the first of which is the heading, as aligned columns; those in `right` are flushed right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def wrapped(text: str, columns: int) -> str:
    """`text` with lines that are at most `columns` cells wide, broken between words; a longer word stays whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        first, *words = line.split(" ") if _cells(line) > columns else [line]
        lines.append(first)
        for word in words:
            if _cells(lines[-1]) + 1 + _cells(word) <= columns:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return "\n".join(lines)


def shortened(text: str, columns: int) -> str:
    """`text` in one line of at most `columns` cells; three dots stand for what is left out."""
    if _cells(text) <= columns:
        return text
    kept = text[: max(columns - len(DOTS), 0)]
    while _cells(kept) > max(columns - len(DOTS), 0):
        kept = kept[:-1]
    return kept.rstrip() + DOTS[: max(columns, 0)]


def _cells(text: str) -> int:
    """How wide a text is on a terminal."""
    if text.isascii():
        return len(text)

    from rich.cells import cell_len

    return cell_len(text)


def size(num_bytes: float) -> str:
    """A size for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.95 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def count(number: int, what: str) -> str:
    """So many of what has a plural in s."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """How long ago something was, in its largest unit."""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            return f"{count(int(seconds // length), unit)} ago"
    return "just now"


class Status:
    """A line on stderr that is replaced and goes away: progress. Nothing where that cannot be or is unwanted."""

    def __init__(self) -> None:
        self.works = is_terminal(sys.stderr) and config.wants_colour()
        self._drawn_s = 0.0
        self._shown = False

    def show(self, text: str) -> None:
        """Replace the line; within a tenth of a second of the last time nothing happens."""
        now = time.monotonic()
        if self.works and now - self._drawn_s >= REDRAW_S:
            self._drawn_s, self._shown = now, True
            columns = terminal_size(sys.stderr).columns - 1
            sys.stderr.write(f"\r\x1b[K{shortened(text, columns)}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown, self._drawn_s = False, 0.0


@contextmanager
def fetching(name: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a receiver of progress (stage, done and total bytes): a bar where one can be drawn, else lines."""
    status, stages = Status(), set()

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage not in stages and not status.works:
            note(f"{stage} {name}")
        stages.add(stage)
        status.show(f"{stage} {name} {bar(done, total)}")

    try:
        yield progress
    finally:
        status.clear()


def bar(done: int, total: int | None) -> str:
    """`done` of `total` bytes as a bar, or as a size where the total is not known; nothing where neither is."""
    if not total:
        return size(done) if done else ""
    share = min(done / total, 1.0)
    cells = int(share * BAR_CELLS)
    return f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}] {share:4.0%} {size(done)} of {size(total)}"
