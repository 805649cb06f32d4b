"""Cache hits computed again from the start and compared: whether what was adopted gives what it should.

A sample of the rows that began with adopted tokens is taken, each as its first token is drawn. Its prompt is then
run in an empty row of its own, one piece after each tick, and the logits and the draw behind its last token are
held against the row's own. Knows neither rows' storage nor the prompt cache, and changes neither; its own row is
dense, and beside what rows may take.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from engine.forward import Forward, Span
from engine.plan import PrefillPlan
from engine.request import Row
from engine.sample.state import Draw

log = logging.getLogger(__name__)

MAX_WAITING = 4  # more hits than these wait for no tick
TOLERANCE = 1e-4  # of the largest logit, where the kernels promise no equal bits


@dataclass(slots=True)
class _Check:
    """A row to be computed again: `cold` has its prompt alone, `logits` `[vocab]` and `token` are the row's."""

    cold: Row
    num_adopted: int
    draw: Draw
    logits: np.ndarray[Any, Any]
    token: int


class Verifier:
    """Checks a share `rate` of the hits it is shown: of every 1 / rate hits, the last.

    `exact`: the logits' bits must be equal. `plan` is that of a prompt of which nothing can be adopted. `slot`
    says where the forward finds the adapter of a row.
    """

    def __init__(
        self,
        rate: float,
        forward: Forward,
        plan: PrefillPlan,
        sample: Callable[[mx.array, Sequence[Draw]], mx.array],
        *,
        exact: bool,
        slot: Callable[[int], int] = lambda number: 0,
    ) -> None:
        self._rate = rate
        self._forward = forward
        self._plan = plan
        self._sample = sample
        self._exact = exact
        self._slot = slot
        self._num_hits = 0
        self._waiting: deque[_Check] = deque()
        self.num_checked = 0
        self.num_different = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those that are to be computed again."""
        return tuple(check.cold for check in self._waiting)

    def samples(self, row: Row) -> bool:
        """Whether `row`, whose prompt's last piece runs, is a hit to be checked; counts the hits, so ask once."""
        if not self._rate or not row.num_cached or row.output:
            return False
        self._num_hits += 1
        return int(self._num_hits * self._rate) > int((self._num_hits - 1) * self._rate)

    def take(self, row: Row, draw: Draw, logits: mx.array, token: int) -> None:
        """Check later whether `row` had these `logits` `[vocab]`, evaluated, and this `token` without adoption.

        Where too many wait already, some are computed before this returns.
        """
        request = replace(row.request, cache_prompt=False)
        cold = Row(request, row.limit_tokens, row.seed, None, adapter=row.adapter)
        self._waiting.append(_Check(cold, row.num_cached, draw, _numbers(logits), token))
        while len(self._waiting) > MAX_WAITING:
            self.advance()

    def advance(self) -> None:
        """Run the next piece of what waits longest; after its last, compare. A fault ends that check alone."""
        if not self._waiting:
            return
        check = self._waiting[0]
        try:
            logits = self._run_piece(check.cold)
            if logits is not None:
                self._compare(check, logits)
        except Exception:
            log.exception("request %s: what it adopted could not be checked", check.cold.request.id)
            check.cold.cursor = len(check.cold.request.prompt)
        if check.cold.prefilled:
            self._waiting.popleft()

    def _run_piece(self, cold: Row) -> mx.array | None:
        """Logits `[1, vocab]` after the prompt's last token, evaluated; None while more pieces follow."""
        [piece] = self._plan.pieces([cold], decoding=True)
        cold.storage = cold.storage or self._forward.open_dense()
        tokens = cold.request.prompt[piece.start : piece.stop]
        span = Span(cold.storage, tokens, num_sampled=int(piece.is_last), adapter=self._slot(cold.adapter))
        logits = self._forward.run([span])
        mx.eval(logits, cold.storage.arrays())
        cold.cursor = piece.stop
        return logits if piece.is_last else None

    def _compare(self, check: _Check, logits: mx.array) -> None:
        cold = _numbers(logits[0])
        tokens: list[int] = self._sample(logits, [check.draw]).tolist()  # type: ignore[assignment]
        self.num_checked += 1
        if difference := self._difference(check, cold, tokens[0]):
            self.num_different += 1
            log.error(
                "request %s: %d adopted tokens of %d do not give what computing the whole prompt gives: %s",
                check.cold.request.id,
                check.num_adopted,
                len(check.cold.request.prompt),
                difference,
            )

    def _difference(self, check: _Check, cold: np.ndarray[Any, Any], token: int) -> str:
        """The first difference that breaks the promise, in words; an empty string where it is kept."""
        allowed = 0.0 if self._exact else TOLERANCE * float(np.abs(cold[np.isfinite(cold)]).max(initial=0.0))
        apart = np.flatnonzero(~np.isclose(check.logits, cold, rtol=0.0, atol=allowed, equal_nan=True))
        if apart.size:
            at = int(apart[0])
            return (
                f"{apart.size} of {cold.size} logits differ, the first that of token {at}: "
                f"{check.logits[at]:.9g} instead of {cold[at]:.9g}"
            )
        return "" if token == check.token else f"token {check.token} was drawn instead of {token}"


def _numbers(logits: mx.array) -> np.ndarray[Any, Any]:
    """A copy that no later step writes into."""
    return np.array(logits.astype(mx.float32))
