"""What a node counts of what it says to others."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """`refused` is what was not let in, or not taken, by why; `state_bytes` what of rows was `sent` and `fetched`.

    `states` are rows: `left` here to be fetched, `fetched` from elsewhere, `recomputed` since they could not be,
    or `expired` since nobody came for them.
    """

    refused: Counter[str] = field(default_factory=Counter)
    state_bytes: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
