"""What an answer is made of on its way from a server to a terminal: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what was thought before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """`done` of `total` prompt tokens are stored."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class End:
    """The answer is whole. `usage` and `timings` are the server's figures, as far as they are some."""

    finish_reason: str
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)


Piece = Text | Reasoning | Prefill | End
