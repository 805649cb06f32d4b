"""A forward on its way: what was submitted, and what is still to be read of it. Plain data around arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from engine.errors import MlxcelError
from engine.plan import Piece
from engine.request import Row
from engine.sample.measure import Measures
from engine.sample.state import Draw


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submitted forward: its pieces, the rows that get tokens from it, what they have drafted, the unread tokens
    `[draws]`, a row's own before those behind its drafted ones, and what is told of them.

    `hits` are the places among the draws of those that are to be verified, with their logits `[vocab]`;
    `faults` are why rows get none.
    """

    pieces: tuple[Piece, ...]
    rows: tuple[Row, ...]
    drafts: Mapping[Row, tuple[int, ...]]
    tokens: mx.array
    measures: Measures
    hits: tuple[tuple[int, Draw, mx.array], ...] = ()
    faults: Mapping[Row, MlxcelError] = field(default_factory=dict)
