"""The beginning of a next prompt, stored while nothing else runs.

Asked for by whoever knows how a conversation will go on. One piece runs after each look at the mail; a request
that comes ends it, and what was stored by then is kept. It is no request: it has no slot, gives no token and is
not counted. Knows neither templates nor clients.
"""

import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.plan import SHARED_MAX_TOKENS, Piece, PrefillPlan
from engine.request import Request, Row

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

MAX_WAITING = 8  # conversations; of more the oldest is forgotten


class WarmUps:
    """What waits, the newest first, and the row that runs. `plan` is that of the requests.

    All of a prompt but its last token is stored: that one is for the request that comes.
    """

    def __init__(self, engine: "Engine", plan: PrefillPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._waiting: deque[Request] = deque(maxlen=MAX_WAITING)
        self._row: Row | None = None

    @property
    def has_work(self) -> bool:
        return self._row is not None or bool(self._waiting)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The row that runs, if one does."""
        return () if self._row is None else (self._row,)

    def add(self, requests: Iterable[Request]) -> None:
        self._waiting.extend(requests)

    def leave(self) -> None:
        """A request has come: give everything back."""
        if self._row is not None:
            self._end(self._row)

    def advance(self) -> None:
        """Run one piece. A fault ends this warm-up alone."""
        row = self._row or self._begin()
        if row is None:
            return
        stop = len(row.request.prompt) - 1
        try:
            piece = self._plan.piece(row, min(self._plan.budget(decoding=True), SHARED_MAX_TOKENS))
            if piece.start < stop:
                self._engine.prefill([Piece(row, piece.start, min(piece.stop, stop))])
            if piece.start >= stop or row.cursor >= stop:
                self._end(row)
        except Exception:
            log.exception("the next turn could not be prepared")
            self._engine.abandon()
            self._end(row)

    def _begin(self) -> Row | None:
        """A row for the newest that waits and that can be stored now."""
        while self._waiting:
            try:
                row = self._engine.submit(self._waiting.pop())
            except RequestError:
                continue
            except Exception:
                log.exception("the next turn could not be prepared")
                continue
            row.is_warm_up = True
            if self._engine.memory.admits(row, decoding=False):
                self._row = row
                return row
        return None

    def _end(self, row: Row) -> None:
        self._row = None
        self._engine.cancel(row)
        self._engine.memory.frees(row)
