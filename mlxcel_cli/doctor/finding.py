"""One thing that was looked at: how it is, and what to do about it. Plain data."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """`broken` keeps something from working, `warning` makes it worse, `note` may surprise."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """`area` is what was looked at, `said` one line about it, `hint` what to do next where it is not ok."""

    area: str
    state: State
    said: str
    hint: str = ""
