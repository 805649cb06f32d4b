"""The markup of a reply that the prompt has begun: its filter is in the state that the text so far leaves it in.

What of that text is still undecided, such as the beginning of a tag, is no news when it is decided, but for that
of a call, which is read as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from engine.text.filter import Markup
from engine.text.parts import Part, StreamFilter


@dataclass(frozen=True, slots=True)
class Continued(Markup):
    """That of a reply which goes on from `begun`, the end of its prompt; `opening` is what comes before that."""

    begun: str = ""

    @classmethod
    def of(cls, markup: Markup, begun: str) -> "Continued":
        return cls(**{field.name: getattr(markup, field.name) for field in fields(markup)}, begun=begun)

    @property
    def breaks_off_in_call(self) -> bool:
        """Whether the text ends within a call."""
        filter_ = Markup.filter(self)
        parts = [*filter_.feed(self.begun), *filter_.finish()]
        return bool(parts) and parts[-1].kind == "call" and not parts[-1].closed

    def filter(self) -> StreamFilter:
        filter_ = Markup.filter(self)
        filter_.feed(self.begun)
        return _Behind(filter_) if filter_.num_held else filter_


class _Behind:
    """A filter of whose text the characters that it holds now are not told."""

    def __init__(self, filter_: StreamFilter) -> None:
        self._filter = filter_
        self._num_known = filter_.num_held

    @property
    def is_reasoning(self) -> bool:
        return self._filter.is_reasoning

    @property
    def num_held(self) -> int:
        return max(self._filter.num_held - self._num_known, 0)

    def feed(self, text: str) -> list[Part]:
        return self._new(self._filter.feed(text))

    def finish(self) -> list[Part]:
        return self._new(self._filter.finish())

    def _new(self, parts: Sequence[Part]) -> list[Part]:
        new = []
        for part in parts:
            known = min(self._num_known, len(part.text))
            self._num_known -= known
            told = part.text[:known].lstrip() if part.kind == "call" else ""
            if text := told + part.text[known:]:
                new.append(replace(part, text=text))
        return new
