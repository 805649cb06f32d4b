"""A JSON object that comes in pieces: how far it is one, and what of it is whole by then.

Strict (RFC 8259), and a little more so: every escaped surrogate is one of a pair, and nothing is deeper than
`MAX_DEPTH`. So whatever it takes is a beginning that every client's parser can read. Keeps no text.
"""

import re
from typing import Literal

MAX_DEPTH = 128
_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = "0123456789"
_WORDS = {word[0]: word[1:] for word in ("true", "false", "null")}
# What a number may go on with, by what it ends with.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {**dict.fromkeys(_DIGITS, "integer"), "0": "zero"},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": {**dict.fromkeys(_DIGITS, "integer"), ".": "point", "e": "exponent", "E": "exponent"},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), "e": "exponent", "E": "exponent"},
    "exponent": {**dict.fromkeys(_DIGITS, "power"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
_NUMBERS = ("zero", "integer", "fraction", "power")  # what a number may end with


class JsonObject:
    """`state` is `open` until the last brace has come, or what can be in no object."""

    def __init__(self) -> None:
        self.state: Literal["open", "ended", "broken"] = "open"
        self._in: Literal["between", "text", "escape", "hex", "number", "word"] = "between"
        self._expects = "{"  # between two tokens: letters that say what may come, v for a value
        self._closers = ""  # the innermost first
        self._is_key = False  # of a text
        self._hex = ""
        self._needs_low = False  # an escape that is the second of a pair
        self._number = ""
        self._word = ""
        self._taken = 0
        self._whole = 0, ""

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the object: all, while it is open."""
        at = 0
        while at < len(text) and self.state == "open":
            if self._in == "text" and not self._needs_low and (plain := _PLAIN.match(text, at)):
                self._taken += plain.end() - at
                at = plain.end()
                continue
            self._taken += 1
            if self._step(text[at]):
                at += 1
            else:
                self.state = "broken"
        return at

    @property
    def whole(self) -> tuple[int, str]:
        """How many of its characters are nothing but whole values, and what would close it behind them.

        A number that may go on is whole if it could end there.
        """
        if self.state == "open" and self._in == "number" and self._number in _NUMBERS:
            return self._taken, self._closers
        return self._whole

    def _step(self, letter: str) -> bool:
        """Whether `letter` may come next."""
        match self._in:
            case "number" if (after := _NUMBER[self._number].get(letter)) is not None:
                self._number = after
                return True
            case "number":
                if self._number not in _NUMBERS:
                    return False
                self._end_value(self._taken - 1)
                return self._step(letter)
            case "word":
                goes_on, self._word = letter == self._word[0], self._word[1:]
                if goes_on and not self._word:
                    self._end_value(self._taken)
                return goes_on
            case "between":
                return letter in _SPACE or self._between(letter)
        return self._in_text(letter)

    def _between(self, letter: str) -> bool:
        if letter in self._expects:
            match letter:
                case "{" | "}" | "]":
                    return self._open("}", "}k") if letter == "{" else self._close()
                case ",":
                    self._expects = "k" if self._closers[0] == "}" else "v"
                case ":":
                    self._expects = "v"
            return True
        if letter == '"' and ("k" in self._expects or "v" in self._expects):
            self._in, self._is_key = "text", "k" in self._expects
            return True
        return "v" in self._expects and self._begin_value(letter)

    def _begin_value(self, letter: str) -> bool:
        if letter in "{[":
            return self._open(*(("}", "}k") if letter == "{" else ("]", "]v")))
        if letter == "-" or letter in _DIGITS:
            self._in = "number"
            self._number = {"-": "minus", "0": "zero"}.get(letter, "integer")
            return True
        self._in, self._word = "word", _WORDS.get(letter, "")
        return bool(self._word)

    def _open(self, closer: str, expects: str) -> bool:
        if len(self._closers) == MAX_DEPTH:
            return False
        self._closers = closer + self._closers
        self._expects = expects
        self._whole = self._taken, self._closers
        return True

    def _close(self) -> bool:
        self._closers = self._closers[1:]
        self._end_value(self._taken)
        return True

    def _end_value(self, taken: int) -> None:
        """A value ends with the character number `taken`."""
        self._in, self._whole = "between", (taken, self._closers)
        self._expects = f",{self._closers[:1]}"
        if not self._closers:
            self.state = "ended"

    def _in_text(self, letter: str) -> bool:
        if self._in == "hex":
            return letter in "0123456789abcdefABCDEF" and self._add_hex(letter)
        if self._in == "escape":
            self._in, self._hex = ("hex", "") if letter == "u" else ("text", "")
            return letter == "u" or (letter in '"\\/bfnrt' and not self._needs_low)
        if letter == "\\":
            self._in = "escape"
            return True
        if letter != '"' or self._needs_low:
            return False
        if self._is_key:
            self._in, self._expects = "between", ":"
        else:
            self._end_value(self._taken)
        return True

    def _add_hex(self, letter: str) -> bool:
        self._hex += letter
        if len(self._hex) < 4:
            return True
        code = int(self._hex, 16)
        is_low = 0xDC00 <= code < 0xE000
        fits = is_low == self._needs_low
        self._in, self._needs_low = "text", 0xD800 <= code < 0xDC00
        return fits


def whole_part(text: str) -> str:
    """A beginning of an object without what is not whole in it, and closed; an empty object for no beginning."""
    scanned = JsonObject()
    scanned.feed(text)
    length, closers = scanned.whole
    return text[:length] + closers or "{}"
