"""Which way each forward went: counted, and said in the log when it is taken for the first time."""

import logging
from collections import Counter
from collections.abc import Iterable

from engine.cache.rows import RowStorage

log = logging.getLogger(__name__)

# What the log says of each.
WAYS = {
    "paged_fused": "paged: fused launch",
    "paged_recorded": "paged: recorded step",
    "paged_by_row": "paged: one launch for each row, the blocks laid together",
    "dense_fused": "dense: fused launch",
    "dense_recorded": "dense: recorded step",
    "dense_by_row": "dense: one launch for each row",
    "dense_gathered": "dense: rows side by side, padded and masked",
    "whole": "whole texts in one call of the model, nothing kept",
    "alone": "dense: one call of the model for each row",
}


class Launches:
    """Counts for one engine. A launch is one forward, over all of its layers."""

    def __init__(self) -> None:
        self.is_trying = False  # a forward that nobody asked for is not counted
        self.counts: Counter[str] = Counter(dict.fromkeys(WAYS, 0))

    def count(self, way: str, rows: Iterable[RowStorage]) -> None:
        """A forward went `way`; `rows` are those that it has advanced."""
        if self.is_trying:
            return
        if not self.counts[way]:
            visible = [row.length for row in rows]
            log.info("%s (batch %d, %d visible tokens)", WAYS[way], len(visible), sum(visible))
        self.counts[way] += 1
