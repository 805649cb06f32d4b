"""A reply's calls as they come: announced, with their arguments as the model writes them, or given back as text.

Where a call's arguments are a JSON object in its text (`callways.py`), the call is announced when more than
`READ_FIRST` characters of them have come, and they are streamed as they are written. A shorter call, and every
other way to write one, is read when it is whole (`toolcalls.py`). What is done with a text depends on the text
alone, not on the pieces that it comes in. docs/tools.md has the rules in words.
"""

import json
from dataclasses import dataclass
from typing import Literal

from engine.text.callways import MAX_OPENING, num_behind, way_of
from engine.text.channels import ENDS
from engine.text.jsonobject import JsonObject
from engine.text.parts import Part, overlap
from engine.text.toolcalls import Call, ToolCalls, Tools, is_readable, own_id

READ_FIRST = 64  # characters of arguments that a call is not announced with


@dataclass(frozen=True, slots=True)
class Begun:
    """A call to `name`; its arguments follow. `id` is the model's own, or empty."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the call that has begun. Its arguments are a JSON object if it `is_whole`, else no JSON."""

    is_whole: bool


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Text that is no call, or none any more."""

    text: str


Event = Begun | Arguments | Ended | GivenBack


class CallStream:
    """Reads all calls of one reply. Without `parallel` the first is the only one, and others are dropped.

    A call is read in modes: `opening` up to its arguments, `arguments`, `behind` them, and `apart`, where it has
    to be whole to be read, or `text`, where it was announced and cannot be understood any more. `num_whole` counts
    those that ended whole.
    """

    def __init__(self, calls: ToolCalls, tools: Tools, *, parallel: bool) -> None:
        self._calls = calls
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}
        self._parallel = parallel
        self._way = way_of(calls)
        self._events: list[Event] = []
        self._num_begun = 0
        self.num_whole = 0
        self._begin()

    def _begin(self, rest: str = "", *, goes_on: bool = False) -> None:
        """A call may begin, the first in its part or one that `goes_on` behind another."""
        self._mode: Literal["opening", "arguments", "behind", "apart", "text"] = "opening"
        self._text = rest  # of this call
        self._goes_on = goes_on
        self._name = self._id = ""
        self._object = JsonObject()
        self._start = self._read = self._told = 0  # where the arguments begin, and how far they are read and told
        self._is_announced = False
        self._is_silent = not self._parallel and self._num_begun > 0

    def feed(self, part: Part) -> list[Event]:
        """What a part of a call says."""
        tag = self._end_tag(part.text) if part.closed else ""
        self._text += part.text.removesuffix(tag)
        self._go_on()
        if part.closed:
            self._end(tag, was_cut=False)
        return self._released()

    def finish(self, *, was_cut: bool) -> list[Event]:
        """What there is to say of a call that the reply ends in: cut by a bound, or left so by the model."""
        if self._mode == "arguments":
            self._read_arguments(holds=False)
        self._go_on()
        if self._text or self._is_announced:
            self._end("", was_cut=was_cut)
        return self._released()

    @property
    def is_holding(self) -> bool:
        """Whether there is text that was neither told nor given back."""
        return self._told < len(self._text)

    def _end_tag(self, text: str) -> str:
        markup = self._calls.markup
        tags = ENDS if markup.harmony else [end for _, end in markup.calls]
        return next((tag for tag in tags if text.endswith(tag)), "")

    def _go_on(self) -> None:
        steps = {"opening": self._open, "arguments": self._read_arguments, "behind": self._leave}
        while (step := steps.get(self._mode)) is not None and step():
            pass
        if self._mode == "text":
            self._give_back(self._text)
            self._text = ""

    def _open(self) -> bool:
        found = self._way.opening.match(self._text, 0, MAX_OPENING + 1) if self._way else None
        if found is None:
            if self._way is None or len(self._text) > MAX_OPENING:
                self._mode = "apart"
            return False
        self._name, self._id = found["name"], own_id(found.groupdict().get("id"))
        self._start = self._read = self._told = found.end()
        self._mode = "arguments" if self._name in self._names else "apart"
        return True

    def _read_arguments(self, *, holds: bool = True) -> bool:
        """Read and tell arguments, all but the brace that ends them. `holds` back what may begin a tag behind."""
        assert self._way is not None, "only a known way has arguments"
        tag = self._way.ends[0] if self._way.several and self._way.ends else ""
        at = self._text.find(tag, self._read) if tag else -1
        stop = len(self._text) - (overlap(self._text[self._read :], tag) if holds else 0) if at < 0 else at
        self._read += self._object.feed(self._text[self._read : stop])
        ends = self._object.state == "ended"
        if self._read - self._start > READ_FIRST and not self._is_silent:
            self._tell(self._read - ends)
        if ends:
            self._mode = "behind"
        elif self._object.state == "broken" or at >= 0:
            self._break()
        return ends

    def _leave(self) -> bool:
        assert self._way is not None, "only a known way has arguments"
        length = num_behind(self._text[self._read :], self._way.ends) if self._way.several else -1
        if length == -1:
            return False
        if length is None or not self._confirm(self._text[: self._read + length]):
            self._break()
            return False
        self._begin(self._text[self._read + length :], goes_on=True)
        return True

    def _end(self, tag: str, *, was_cut: bool) -> None:
        """The part that the call is in ends with `tag`, or the reply does, without it."""
        if was_cut and self._mode in ("arguments", "behind"):
            self._cut()
        elif self._is_announced and self._mode != "text":
            if not self._confirm(self._text + tag):
                self._break()
                self._go_on()
        elif self._mode != "text":
            self._read_apart(tag, was_cut=was_cut)
        self._begin()

    def _read_apart(self, tag: str, *, was_cut: bool) -> None:
        """Read what is whole now, unless it was cut: then nobody knows what it would have become."""
        if self._goes_on and self._is_tag(self._text.strip()):
            return
        calls = () if was_cut else self._calls.read(self._opened(self._text + tag), self._tools)
        for call in calls:
            self._give(call)
        if not calls:
            self._give_back(self._text + ("" if self._goes_on else tag))

    def _is_tag(self, text: str) -> bool:
        """Whether `text` is the beginning of a tag that ends all calls, or nothing."""
        return self._way is not None and any(tag.startswith(text) for tag in self._way.tags)

    def _cut(self) -> None:
        """A call as far as the model came; whole where nothing of it is missing but markup."""
        assert self._way is not None, "only a known way has arguments"
        if self._is_silent:
            return
        ends = self._mode == "behind"
        behind = [num_behind(self._text[self._read :], (*self._way.ends, tag)) for tag in self._way.tags]
        is_whole = ends and any(length == -1 for length in behind) and is_readable(self._arguments)
        self._tell(self._read - (ends and not is_whole))
        self._finish_call(is_whole=is_whole)
        if not is_whole:
            self._give_back(self._text[self._told :])

    def _confirm(self, text: str) -> bool:
        """Whether a whole text is a call, and the one that was announced if one was; it is told to its end."""
        calls = self._calls.read(self._opened(text), self._tools)
        if not self._is_announced:
            for call in calls:
                self._give(call)
            return bool(calls)
        if self._object.state != "ended" or [call.name for call in calls] != [self._name]:
            return False
        if json.loads(calls[0].arguments) != json.loads(self._arguments):
            return False
        self._tell(self._read)
        self._finish_call(is_whole=True)
        return True

    @property
    def _arguments(self) -> str:
        return self._text[self._start : self._read]

    def _opened(self, text: str) -> str:
        """`text` with the tag that comes before the first of several calls."""
        if self._way is None or not self._goes_on or text.lstrip().startswith(self._way.start):
            return text
        return self._way.start + text

    def _break(self) -> None:
        """The call cannot be understood: it stays as far as it was told, or is read when it is whole."""
        self._mode = "apart"
        if self._is_announced:
            self._finish_call(is_whole=False)
            self._mode, self._text = "text", self._text[self._told :]

    def _tell(self, until: int) -> None:
        """Announce the call, and its arguments up to there."""
        if not self._is_announced:
            self._is_announced = True
            self._num_begun += 1
            self._events.append(Begun(self._name, self._id))
        if until > self._told:
            self._events.append(Arguments(self._text[self._told : until]))
            self._told = until

    def _finish_call(self, *, is_whole: bool) -> None:
        self.num_whole += is_whole
        self._events.append(Ended(is_whole))

    def _give(self, call: Call) -> None:
        if self._parallel or not self._num_begun:
            self._num_begun += 1
            self._events += [Begun(call.name, call.id), Arguments(call.arguments)]
            self._finish_call(is_whole=True)

    def _give_back(self, text: str) -> None:
        if text:
            self._events.append(GivenBack(text))

    def _released(self) -> list[Event]:
        events, self._events = self._events, []
        return events
