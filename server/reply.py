"""What an answer is made of on its way to a dialect: the pieces of its stream, and their fold.

The engine's parts become pieces here: markup goes, calls are read, and a call that cannot be read is given back as
the text that it is. Knows no HTTP and no tags.
"""

import secrets
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from engine.request import FinishReason
from engine.text.callstream import Arguments, Begun, CallStream, Ended, Event, GivenBack
from engine.text.parts import Part
from engine.text.toolcalls import ToolCalls, Tools

Reason = FinishReason | Literal["tool_calls"]

ARGUMENTS_PIECE = 256  # characters of a call's arguments in one piece
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Text:
    """More text of one choice."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More reasoning of one choice."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The call `index` of one choice, from 0; its arguments follow."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, which are JSON when they are whole."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call: no more of it comes. One that is not whole was cut, or cannot be understood further."""

    choice: int
    index: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice."""

    choice: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` prompt tokens of one choice are stored."""

    done: int
    total: int


AnswerPiece = Text | Reasoning | CallBegun | CallArguments | CallEnded | Finish | Prefilled


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer's calls are read: with what, of which tools, and whether there may be several."""

    tool_calls: ToolCalls
    tools: Tools = ()
    parallel: bool = True


class Reader:
    """Turns the parts of one choice into pieces."""

    def __init__(self, choice: int, reading: Reading) -> None:
        self._choice = choice
        self._calls = CallStream(reading.tool_calls, reading.tools, parallel=reading.parallel)
        self._index = -1  # of the last call that has begun
        self._in_call = False
        self._gave_back = False  # whether the last call was text, at its end at least

    def pieces(self, parts: Sequence[Part], reason: FinishReason | None = None) -> Iterator[AnswerPiece]:
        """The pieces of some parts, and of the end where there is a `reason` for it."""
        for part in parts:
            match part.kind:
                case "answer":
                    yield Text(self._choice, part.text)
                case "reasoning":
                    yield Reasoning(self._choice, part.text)
                case "call":
                    self._gave_back = self._gave_back and self._in_call
                    self._in_call = not part.closed
                    yield from self._told(self._calls.feed(part))
                    continue
                case "markup" if self._gave_back and part.text.isspace():
                    yield Text(self._choice, part.text)
                    continue
            self._gave_back = False
        if reason is not None:
            yield from self._told(self._calls.finish(was_cut=reason == "length"))
            yield Finish(self._choice, "tool_calls" if reason == "stop" and self._calls.num_whole else reason)

    @property
    def is_holding(self) -> bool:
        """Whether there is text of a call of which it is not known what it will be."""
        return self._calls.is_holding

    def _told(self, events: Sequence[Event]) -> Iterator[AnswerPiece]:
        for event in events:
            match event:
                case Begun(name=name, id=own):
                    self._index += 1
                    yield CallBegun(self._choice, self._index, own or _new_id(), name)
                case Arguments(text=text):
                    for at in range(0, len(text), ARGUMENTS_PIECE):
                        yield CallArguments(self._choice, self._index, text[at : at + ARGUMENTS_PIECE])
                case Ended(is_whole=is_whole):
                    yield CallEnded(self._choice, self._index, is_whole)
                case GivenBack(text=text):
                    self._gave_back = True
                    yield Text(self._choice, text)
                case _:
                    assert_never(event)


def _new_id() -> str:
    """Nine letters and digits: templates of the Mistral family take no other."""
    return "".join(secrets.choice(LETTERS) for _ in range(9))


@dataclass(slots=True)
class AnsweredCall:
    """A call, or what there is of one."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """The fold of one choice's pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)
    reason: Reason = "length"

    @property
    def content(self) -> str | None:
        """What was said; None where there are calls and nothing else."""
        return self.text or (None if self.calls else "")

    def add(self, piece: AnswerPiece) -> None:
        match piece:
            case Text(text=text):
                self.text += text
            case Reasoning(text=text):
                self.reasoning += text
            case CallBegun(id=own, name=name):
                self.calls.append(AnsweredCall(own, name))
            case CallArguments(index=index, text=text):
                self.calls[index].arguments += text
            case Finish(reason=reason):
                self.reason = reason
