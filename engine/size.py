"""A number of bytes as people write it: 2GiB, 500MB, 1048576; and a bound on them, which may be a word."""

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Size(int):
    """Bytes, from a number or a text. Raises ValueError for a text that is no size."""

    def __new__(cls, said: int | str) -> "Size":
        if isinstance(said, int):
            return super().__new__(cls, said)
        found = _WRITTEN.fullmatch(said)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"{said!r} is no size")
        return super().__new__(cls, round(float(found[1]) * _UNITS[found[2].upper()]))

    def __str__(self) -> str:
        """As it would be written: in the largest binary unit that divides it."""
        for power, letter in reversed(tuple(enumerate("KMGT", 1))):
            if self and self % 1024**power == 0:
                return f"{int(self) // 1024**power}{letter}iB"
        return int.__repr__(self)


class Bound(str):
    """A bound on bytes: `auto`, `none` or a size. Raises ValueError for another text."""

    def __new__(cls, said: int | str) -> "Bound":
        word = said.strip().lower() if isinstance(said, str) else ""
        return super().__new__(cls, word if word in ("auto", "none") else str(Size(said)))

    @property
    def num_bytes(self) -> int | None:
        """The size, or None for a word."""
        return None if self in ("auto", "none") else int(Size(self))


AUTO = Bound("auto")
