"""A terminal of a fixed size in memory: enough of one to tell what a person sees, and what scrolled off."""

import re

from rich.cells import cell_len

PIECE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\r|\n|\t|[^\x1b\r\n\t]")
PRIVATE_MODES = ("2026",)


class Screen:
    """`text` is all that was written, with what scrolled off; a row that was wrapped is part of its line."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.gone: list[tuple[str, bool]] = []
        self.num_erased = 0
        self._rows: list[list[str]] = [[]]
        self._wrapped = [False]  # whether a row goes on in the next one
        self._row, self._column = 0, 0

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            piece = PIECE.match(text, at)
            assert piece is not None, f"no terminal knows {text[at:][:20]!r}"
            at = piece.end()
            self._take(piece)

    def _take(self, piece: re.Match[str]) -> None:
        private, number, kind = piece.groups()
        if kind == "m":
            return
        if private:
            assert number in PRIVATE_MODES
            assert kind in "hl"
        elif kind == "A":
            assert int(number) <= self._row, "it moves above the screen, into what scrolled off"
            self._row -= int(number)
        elif kind == "J":
            self.num_erased += sum(map(len, self._rows[self._row :]))
            self._rows[self._row] = self._rows[self._row][: self._column]
            self._wrapped[self._row] = False
            del self._rows[self._row + 1 :], self._wrapped[self._row + 1 :]
        elif piece.group() == "\r":
            self._column = 0
        elif piece.group() == "\n":
            self._next_row(wraps=False)
        elif piece.group() == "\t":
            for _ in range(8 - self._column % 8):
                self._put(" ")
        else:
            assert kind is None, f"this terminal does not know {piece.group()!r}"
            self._put(piece.group())

    def _put(self, letter: str) -> None:
        width = cell_len(letter)
        if self._column + width > self.columns:
            self._next_row(wraps=True)
        row = self._rows[self._row]
        row[self._column : self._column + width] = [letter, *[""] * (width - 1)]
        self._column += width

    def _next_row(self, *, wraps: bool) -> None:
        self._wrapped[self._row] = wraps
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append([])
            self._wrapped.append(False)
        if len(self._rows) > self.lines:
            self.gone.append(("".join(self._rows.pop(0)), self._wrapped.pop(0)))
            self._row -= 1

    @property
    def rows(self) -> list[str]:
        """What stands on the screen now."""
        return ["".join(row) for row in self._rows]

    @property
    def text(self) -> str:
        rows = [*self.gone, *zip(self.rows, self._wrapped, strict=True)]
        return "".join(row if wrapped else f"{row.rstrip()}\n" for row, wrapped in rows).rstrip("\n")
