"""The last lines on a terminal, which may still change.

What has been kept, or has scrolled off, is never written again: at most a screenful is open, and of that only what
differs is redrawn. It knows lines with colours in them, and nothing of what they say.
"""

import math
import os
import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TABS_AND_COLOURS = re.compile(r"(\t|\x1b\[[0-9;]*m)")
# Between the two a terminal that knows them shows nothing (DEC private mode 2026, "synchronized output").
HOLD, SHOW = "\x1b[?2026h", "\x1b[?2026l"
ERASE_BELOW = "\x1b[J"
TAB_CELLS = 8


class Live:
    """Lines at the end of the terminal that `write` writes to; `size` is its size now."""

    def __init__(self, write: Callable[[str], None], size: Callable[[], os.terminal_size]) -> None:
        self._write = write
        self._size = size
        self._open: list[str] = []
        self._is_cropped = False
        self._columns = 0  # when the open lines were drawn
        self._lost = ""  # the letters of open lines that are out of reach

    @property
    def is_open(self) -> bool:
        """Whether the cursor stands behind a line that may still change."""
        return bool(self._open)

    def draw(self, lines: Sequence[str]) -> None:
        """Show `lines` in place of the open ones; of more than a screenful, the last."""
        size = self._size()
        lines = [untabbed(line) for line in beyond(lines, self._lost)]
        shown, num_rows = len(lines), 0
        while shown and (num_rows := num_rows + rows(lines[shown - 1], size.columns)) < size.lines:
            shown -= 1
        first = min(shown, max(len(lines) - 1, 0))
        self._replace(lines[first:], size)
        self._is_cropped = first > 0

    def keep(self, lines: Sequence[str]) -> None:
        """Write `lines` for good in place of the open ones."""
        rest = beyond(lines, self._lost)
        self._replace(rest, self._size())
        if rest:
            self._write("\n")
        self._open, self._is_cropped = [], False
        self._lost = self._lost[len(letters(lines)) :]

    def _replace(self, lines: Sequence[str], size: os.terminal_size) -> None:
        old, self._open = self._open, list(lines)
        drawn_columns, self._columns = self._columns, size.columns
        same = 0
        while same < min(len(old), len(lines)) and old[same] == lines[same]:
            same += 1
        if same == len(old):
            rest = lines[same:]
            self._write("".join(["\n" if same and rest else "", "\n".join(rest)]))
            return
        if same == len(old) - 1 and same < len(lines) and lines[same].startswith(old[same]):
            self._write("\n".join([lines[same][len(old[same]) :], *lines[same + 1 :]]))
            return
        same = min(same, max(len(lines) - 1, 0))
        num_up = sum(rows(line, size.columns) for line in old[same:]) - 1
        # Where lines went when the width changed is the terminal's own affair.
        if num_up < size.lines and drawn_columns == size.columns:
            up = f"\x1b[{num_up}A" if num_up else ""
            self._write("".join([HOLD, "\r", up, ERASE_BELOW, "\n".join(lines[same:]), SHOW]))
        else:
            self._go_on(old, lines)

    def _go_on(self, old: Sequence[str], lines: Sequence[str]) -> None:
        """Write behind what cannot be reached any more: it has other colours now, or is wrapped otherwise."""
        before, now = ("\n".join(COLOURS.sub("", untabbed(line)) for line in some) for some in (old, lines))
        if now.startswith(before):
            self._write(now[len(before) :])
            return
        rest = lines if self._is_cropped else beyond(lines, letters(old))
        self._lost += "" if self._is_cropped else letters(old)
        self._open = list(rest)
        self._write("\n" + "\n".join(rest))


def letters(lines: Sequence[str]) -> str:
    """What stands in lines, however they are wrapped and coloured."""
    return "".join("".join(COLOURS.sub("", line) for line in lines).split())


def beyond(lines: Sequence[str], lost: str) -> Sequence[str]:
    """`lines` without the ones, or their parts, that hold the letters `lost`; all where they begin otherwise."""
    if not lost or not letters(lines).startswith(lost[: len(letters(lines))]):
        return lines
    for number, line in enumerate(lines):
        held = letters([line])
        if len(held) > len(lost):
            plain, at = COLOURS.sub("", line), 0
            while lost:
                lost = lost[not plain[at].isspace() :]
                at += 1
            return [plain[at:].lstrip(), *lines[number + 1 :]]
        lost = lost[len(held) :]
    return []


def rows(line: str, columns: int) -> int:
    """How many rows of the terminal a line takes."""
    return max(1, math.ceil(cell_len(COLOURS.sub("", line)) / max(columns, 1)))


def untabbed(line: str) -> str:
    """A line with spaces for its tabs, so that its cells can be counted: a terminal's tabs end at its edge."""
    if "\t" not in line:
        return line
    parts, cells = [], 0
    for part in TABS_AND_COLOURS.split(line):
        if part == "\t":
            part = " " * (TAB_CELLS - cells % TAB_CELLS)
        if not part.startswith("\x1b"):
            cells += cell_len(part)
        parts.append(part)
    return "".join(parts)
