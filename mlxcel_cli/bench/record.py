"""What became of one request: when it was due, when its pieces came, how many tokens it had. Plain data.

All times are seconds on one clock of the measuring process.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """One request. `due_s` is when it was meant to be sent: what is waited for counts from there, also where
    sending was late. `error` is the kind of what went wrong, or empty.
    """

    due_s: float
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.pieces_s)

    @property
    def ttft_s(self) -> float:
        """Until the first piece of text."""
        return self.pieces_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece of text and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.pieces_s)]

    @property
    def token_s(self) -> float:
        """What each token after the first took on average; 0 where there is none."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / max(self.completion_tokens - 1, 1)

    @property
    def e2e_s(self) -> float:
        """Until the answer was whole."""
        return self.ended_s - self.due_s

    @property
    def late_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.due_s

    @property
    def counted_by_server(self) -> bool:
        return _count(self.usage, "completion_tokens") > 0

    @property
    def completion_tokens(self) -> int:
        """What the server says, else the pieces of text: a piece may hold several tokens, or a part of one."""
        return _count(self.usage, "completion_tokens") or len(self.pieces_s)

    @property
    def prompt_tokens(self) -> int:
        return _count(self.usage, "prompt_tokens")

    @property
    def cached_tokens(self) -> int:
        return _count(self.usage.get("prompt_tokens_details"), "cached_tokens")


def _count(usage: object, name: str) -> int:
    """The number of tokens that `usage` has under `name`; 0 where it says none."""
    return int(usage.get(name, 0)) if isinstance(usage, Mapping) else 0
