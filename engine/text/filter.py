"""The stream filter: a reply's text, as it comes, into answer, reasoning, tool calls and markup.

Every character given comes out in one part, in its order, whatever the pieces were; nothing is raised. Which tags
there are is said by a `Markup`, and where the reply begins by the end of the rendered prompt. What a call says is
not known here (`toolcalls.py`). docs/tools.md has the rules in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.text.channels import CALLED, CHANNEL, END, MESSAGE, START, Channels
from engine.text.parts import Kind, Part, StreamFilter, overlap, put

THINK = ("<think>", "</think>")
MAX_OPENING = 256  # characters of a prompt's end that may say how the reply begins
# Where a template names no tags of its own, tools are written out with these (`template.py`).
PLAIN_CALLS = (("<tool_call>", "</tool_call>"),)
# A call of Qwen3-Coder's without its opening tag, which is left out now and then.
BARE_CALL = ("<function=", "</function>")


@dataclass(frozen=True, slots=True)
class Markup:
    """How one reply is marked up. `calls` are pairs of tags; an empty end: the call goes on to the reply's end.

    `dropped` are tags around the answer that say nothing. With `harmony`, channels take the place of all tags, and
    `calls` only says whether there may be any. `opening` is the end of the prompt that the reply goes on from.
    """

    think: tuple[str, str] | None = None
    calls: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    harmony: bool = False
    opening: str = ""

    @classmethod
    def of(cls, tokenizer: Any, source: str) -> "Markup":
        """What an mlx-lm tokenizer wrapper and the text of its chat template know of a model's markup."""
        if CHANNEL in source and MESSAGE in source:
            return cls(harmony=True, calls=((CHANNEL, CALLED),))
        think = None
        if tokenizer.has_thinking:
            think = (tokenizer.think_start, tokenizer.think_end)
        elif any(tag in source for tag in THINK):
            think = THINK
        calls: tuple[tuple[str, str], ...] = PLAIN_CALLS
        if tokenizer.tool_parser is not None:
            calls = ((tokenizer.tool_call_start, tokenizer.tool_call_end),)
            if calls == PLAIN_CALLS and BARE_CALL[0] in source:
                calls = (*PLAIN_CALLS, BARE_CALL)
        return cls(think, calls, tuple(tokenizer.structural_markers))

    @property
    def reasons(self) -> bool:
        """Whether a reply may have reasoning that can be told from its answer."""
        return self.harmony or self.think is not None

    @property
    def ends_thought(self) -> str:
        """What a model would write to end its reasoning, up to where an answer can begin."""
        if self.harmony:
            return f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
        if self.think is None:
            return ""
        return f"\n{self.think[1]}" if self.think == THINK else self.think[1]

    def behind(self, prompt: str, *, calls: bool) -> "Markup":
        """That of a reply to `prompt`, which may have calls or not."""
        opening = prompt[-MAX_OPENING:]
        if self.harmony:
            at = opening.rfind(START)
            opening = opening[at:] if at >= 0 else ""
        return replace(self, calls=self.calls if calls else (), opening=opening)

    def filter(self) -> StreamFilter:
        """A filter for one reply."""
        return Channels(self.opening, may_call=bool(self.calls)) if self.harmony else _Tags(self)


@dataclass(frozen=True, slots=True)
class _Code:
    """Whether a place in a Markdown text is code: in a fence, or behind an odd number of a line's backticks."""

    fenced: bool = False
    line: str = ""  # how the line begins
    ticked: bool = False

    def after(self, text: str) -> "_Code":
        fenced, line, ticked = self.fenced, self.line, self.ticked
        for letter in text:
            line = "" if letter == "\n" else (line + letter).lstrip()[:4]
            ticked = letter != "\n" and ticked != (letter == "`")
            if line in ("```", "~~~") and letter in "`~":
                fenced, ticked = not fenced, False
        return _Code(fenced, line, ticked)

    @property
    def is_code(self) -> bool:
        return self.fenced or self.ticked


class _Tags:
    """Tags around reasoning and calls, in four modes: `lead` is where a tag may open a thought, since no answer
    has come since the beginning or the last tag. White space beside a tag belongs to the tag.
    """

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._mode: Literal["lead", "answer", "reasoning", "call"] = "lead"
        self._held = ""
        self._behind_tag = False
        self._code = _Code()
        self._call_end = ""
        self._looked = 0  # of a call's held text, how much is its opening tag
        self._parts: list[Part] = []
        opens = markup.think is not None and markup.opening.rstrip().endswith(markup.think[0])
        if opens:
            self._mode, self._behind_tag = "reasoning", True

    @property
    def is_reasoning(self) -> bool:
        return self._mode == "reasoning"

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> list[Part]:
        self._held += text
        steps = {"lead": self._lead, "answer": self._answer, "reasoning": self._reason, "call": self._call}
        while steps[self._mode]():
            pass
        return self._released()

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._mode == "call":
            self._put("call", held, closed=False)
        elif self._mode == "reasoning":
            thought = held.rstrip()
            self._put("reasoning", thought)
            self._put("markup", held[len(thought) :])
        else:
            self._put("answer", held)
        return self._released()

    def _lead(self) -> bool:
        said = self._held.lstrip()
        if self._behind_tag:
            self._put("markup", self._held[: len(self._held) - len(said)])
            self._held = said
        if not said:
            return False
        for tag in self._leading():
            if said.startswith(tag):
                self._open(tag, self._held[: len(self._held) - len(said)])
                return True
        if any(tag.startswith(said) for tag in self._leading()):
            return False
        self._mode, self._code, self._behind_tag = "answer", _Code(), False
        return True

    def _answer(self) -> bool:
        tags = (*(start for start, _ in self._markup.calls), *self._markup.dropped)
        at, tag = self._first(tags)
        if tag:
            said = self._held[:at].rstrip()
            self._put("answer", said)
            space, self._held = self._held[len(said) : at], self._held[len(said) :]
            self._open(tag, space)
            return True
        held = self._held
        said = held[: len(held) - max(overlap(held, tag) for tag in tags)].rstrip() if tags else held
        self._put("answer", said)
        self._code = self._code.after(said)
        self._held = held[len(said) :]
        return False

    def _reason(self) -> bool:
        assert self._markup.think is not None, "nothing else opens a thought"
        end = self._markup.think[1]
        if self._behind_tag:
            rest = self._held.lstrip()
            if not rest:
                return False
            self._put("markup", self._held[: len(self._held) - len(rest)])
            self._held, self._behind_tag = rest, False
        held = self._held
        at = held.find(end)
        thought = held[: at if at >= 0 else len(held) - overlap(held, end)].rstrip()
        self._put("reasoning", thought)
        self._held = held[len(thought) :]
        if at < 0:
            return False
        self._take(at - len(thought) + len(end))
        return True

    def _call(self) -> bool:
        held, end = self._held, self._call_end
        at = held.find(end, self._looked) if end else -1
        ends = at >= 0
        stop = at + len(end) if ends else len(held) - overlap(held[self._looked :], end)
        self._put("call", held[:stop], closed=ends)
        self._held, self._looked = held[stop:], 0
        if ends:
            self._mode, self._behind_tag = "lead", True
        return ends

    def _leading(self) -> tuple[str, ...]:
        """Tags that count where no answer has begun; the end of a call that has no beginning among them."""
        think = self._markup.think[:1] if self._markup.think else ()
        starts = tuple(start for start, _ in self._markup.calls)
        strays = tuple(end for _, end in self._markup.calls if end) if self._behind_tag else ()
        return (*think, *starts, *self._markup.dropped, *strays)

    def _open(self, tag: str, space: str) -> None:
        """Go on behind `tag`, which the held text begins with behind `space`."""
        ends = dict(self._markup.calls)
        if tag in ends:
            self._mode, self._call_end = "call", ends[tag]
            self._looked = len(space) + len(tag)
            return
        thinks = self._markup.think is not None and tag == self._markup.think[0]
        self._take(len(space) + len(tag))
        if thinks:
            self._mode = "reasoning"

    def _take(self, length: int) -> None:
        """So much of the held text is markup; behind it no answer has begun."""
        self._put("markup", self._held[:length])
        self._held = self._held[length:]
        self._mode, self._behind_tag = "lead", True

    def _first(self, tags: Sequence[str]) -> tuple[int, str]:
        """Where the first tag is that is not in code, and which."""
        begin = 0
        while True:
            found = [(at, -len(tag), tag) for tag in tags if (at := self._held.find(tag, begin)) >= 0]
            if not found:
                return -1, ""
            at, _, tag = min(found)
            if not self._code.after(self._held[:at]).is_code:
                return at, tag
            begin = at + 1

    def _put(self, kind: Kind, text: str, *, closed: bool = True) -> None:
        put(self._parts, kind, text, closed=closed)

    def _released(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
