"""What a reply's text is taken apart into, and what does that: plain data and a protocol."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

Kind = Literal["answer", "reasoning", "call", "markup"]


@dataclass(frozen=True, slots=True)
class Part:
    """Text of one kind. A call's comes in several parts, its tags in them; `closed` is whether it has ended with
    this one, which the call that a reply ends within never does.
    """

    kind: Kind
    text: str
    closed: bool = True


class StreamFilter(Protocol):
    """What splits one reply."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        ...

    @property
    def num_held(self) -> int:
        """How many of the characters that were taken are in no part yet."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Take `text`; the parts that are certain by now."""
        ...

    def finish(self) -> list[Part]:
        """What was held back: no more text comes."""
        ...


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`, but not all of it."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def put(parts: list[Part], kind: Kind, text: str, *, closed: bool = True) -> None:
    """Add `text` to `parts`: to the last of them where that is as much answer, or reasoning, or the same call.

    Markup is not joined, so that a tag is never one part with what is beside the tag before it.
    """
    if not text:
        return
    last = parts[-1] if parts else None
    if last is not None and last.kind == kind and (kind in ("answer", "reasoning") or not last.closed):
        parts[-1] = replace(last, text=last.text + text, closed=closed)
    else:
        parts.append(Part(kind, text, closed))
