"""Harmony (https://github.com/openai/harmony): messages whose headers name a channel, and perhaps a function.

`Channels` is the stream filter of such replies; what a call says is not known here.
"""

from engine.text.parts import Kind, Part, overlap, put

START, CHANNEL, MESSAGE, END, CALLED = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
ENDS = (END, CALLED, "<|return|>")
MAX_HEADER = 512  # characters of a Harmony header; what is longer is none


class Channels:
    """The filter of one reply. `opening` is the part of its first header that the prompt ends with.

    The channel `analysis` is reasoning; every other is the answer, `commentary` to the person among them. Text
    without a header is the answer.
    """

    def __init__(self, opening: str, *, may_call: bool) -> None:
        self._may_call = may_call
        self._header: str | None = None  # of the message that has begun, as far as it was there before
        self._kind: Kind | None = None  # of the message whose text comes
        self._held = ""
        self._raw = ""  # of a call, what is not out yet
        self._parts: list[Part] = []
        if opening:
            header, message, _ = opening.rpartition(MESSAGE)
            if message:
                self._kind = self._kind_of(header)
            else:
                self._header = opening

    @property
    def is_reasoning(self) -> bool:
        return self._kind == "reasoning"

    @property
    def num_held(self) -> int:
        return len(self._raw) + len(self._held)

    def feed(self, text: str) -> list[Part]:
        self._held += text
        while self._message() if self._kind else self._between() if self._header is None else self._in_header():
            pass
        return self._released()

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._kind == "call":
            put(self._parts, "call", self._raw + held, closed=False)
            self._raw = ""
        elif self._kind is None and held.startswith((START, CHANNEL)):
            put(self._parts, "markup", held)
        else:
            put(self._parts, self._kind or "answer", held)
        return self._released()

    def _between(self) -> bool:
        """Between two messages: a header begins, or text that has none."""
        if not self._held or any(tag.startswith(self._held) for tag in (START, CHANNEL, *ENDS)):
            return self._end_tag()
        if self._end_tag():
            return True
        if self._held.startswith((START, CHANNEL)):
            self._header = ""
        else:
            self._kind = "answer"
        return True

    def _end_tag(self) -> bool:
        for tag in ENDS:
            if self._held.startswith(tag):
                put(self._parts, "markup", tag)
                self._held = self._held[len(tag) :]
                return True
        return False

    def _in_header(self) -> bool:
        """A header ends with MESSAGE. What begins like none, or never ends, is the answer's text; one that another
        tag breaks off is dropped.
        """
        assert self._header is not None, "asked within a header only"
        held, begins = self._held, (START, CHANNEL, MESSAGE, " to=", *ENDS)
        if not held.startswith(begins):
            waits = any(tag.startswith(held) for tag in begins)
            if not waits:
                self._kind, self._header = "answer", None
            return not waits
        found = [(at, tag) for tag in (MESSAGE, *ENDS) if (at := held.find(tag)) >= 0]
        if (at := held.find(START, 1)) >= 0:
            found.append((at, START))
        at, tag = min(found, default=(len(held), ""))
        if at > MAX_HEADER:
            self._kind, self._header = "answer", None
            return True
        if not tag:
            return False
        stop = at + (len(tag) if tag == MESSAGE else 0)
        header, self._held = held[:stop], held[stop:]
        self._kind = self._kind_of(self._header + header) if tag == MESSAGE else None
        self._header = None
        if self._kind == "call":
            self._raw = header
        else:
            put(self._parts, "markup", header)
        return True

    def _message(self) -> bool:
        """The text of a message, to its end or to the next header."""
        tags = (*ENDS, START, CHANNEL)
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        at, tag = min(found) if found else (len(self._held) - max(overlap(self._held, t) for t in tags), "")
        end = at + len(tag) if tag in ENDS else at
        text, self._held = self._held[:at], self._held[end:]
        if self._kind == "call":
            self._raw += text + (tag if tag in ENDS else "")
            stop = len(self._raw) if tag else len(self._raw) - 1  # another header may end it, without a text
            put(self._parts, "call", self._raw[:stop], closed=bool(tag))
            self._raw = self._raw[stop:]
        else:
            assert self._kind is not None, "asked within a message only"
            put(self._parts, self._kind, text)
            put(self._parts, "markup", tag if tag in ENDS else "")
        if tag:
            self._kind = None
        return bool(tag)

    def _kind_of(self, header: str) -> Kind:
        if self._may_call and recipient(header):
            return "call"
        return "reasoning" if channel(header) == "analysis" else "answer"

    def _released(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def channel(header: str) -> str:
    """The channel that a Harmony header names, or nothing."""
    words = header.partition(CHANNEL)[2].replace("<|", " <|").split()
    return words[0] if words else ""


def recipient(header: str) -> str:
    """The function that a Harmony header calls, or nothing."""
    words = header.partition("to=")[2].replace("<|", " <|").split()
    return words[0].removeprefix("functions.") if words else ""
