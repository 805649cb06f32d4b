"""What is told of a draw beside its token: logprobs for those who asked, the surprise that mirostat steers by.

Logprobs are of the logits as the model gave them, whatever the sampler does to them, as in vLLM and llama-server:
two requests that differ in their sampling read the same numbers for the same text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.request import NO_LOGPROB, TokenLogprob
from engine.sample.chain import is_greedy, surprises
from engine.sample.state import Draw

MAX_TOP = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one draw."""

    logprob: TokenLogprob | None = None
    surprise: float | None = None


@dataclass(frozen=True, slots=True)
class Measures:
    """What is measured of the draws of one step, unevaluated: of all `num_rows`, those at `told` and `steered`.

    `chosen` `[told]` are the tokens' logprobs, `top` and `top_ids` `[told, MAX_TOP]` the largest, in no order;
    `surprise` `[steered]` is in bits.
    """

    num_rows: int
    wanted: tuple[int | None, ...] = ()
    told: tuple[int, ...] = ()
    steered: tuple[int, ...] = ()
    chosen: mx.array | None = None
    top: mx.array | None = None
    top_ids: mx.array | None = None
    surprise: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What is to be evaluated with the step."""
        return [array for array in (self.chosen, self.top, self.top_ids, self.surprise) if array is not None]

    def read(self, tokens: Sequence[int]) -> list[Measured]:
        """What was measured of each row, whose tokens these are."""
        logprobs: list[TokenLogprob | None] = [None] * self.num_rows
        surprises: list[float | None] = [None] * self.num_rows
        if self.chosen is not None:
            chosen: list[float] = self.chosen.tolist()  # type: ignore[assignment]
            for place, row in enumerate(self.told):
                logprobs[row] = TokenLogprob(tokens[row], _bounded(chosen[place]), self._most_likely(place, row))
        if self.surprise is not None:
            read: list[float] = self.surprise.tolist()  # type: ignore[assignment]
            for row, surprise in zip(self.steered, read, strict=True):
                surprises[row] = surprise
        return [Measured(*pair) for pair in zip(logprobs, surprises, strict=True)]

    def _most_likely(self, place: int, row: int) -> tuple[tuple[int, float], ...]:
        if not self.wanted[row] or self.top is None or self.top_ids is None:
            return ()
        ids: list[int] = self.top_ids[place].tolist()  # type: ignore[assignment]
        values: list[float] = self.top[place].tolist()  # type: ignore[assignment]
        best = sorted(zip(ids, map(_bounded, values), strict=True), key=lambda pair: (-pair[1], pair[0]))
        return tuple(best[: self.wanted[row]])


def measure(logits: mx.array, tokens: mx.array, draws: Sequence[Draw], wanted: Sequence[int | None]) -> Measures:
    """Measure the draws of `tokens` `[B]` from `logits` `[B, vocab]`. `wanted`: how many logprobs beside the
    token's own each row asks for, None for not even that.
    """
    told = tuple(i for i, count in enumerate(wanted) if count is not None)
    steered = tuple(i for i, draw in enumerate(draws) if draw.sampling.mirostat and not is_greedy(draw))
    chosen = top = top_ids = surprise = None
    if told:
        rows = mx.array(told)
        own = logits[rows].astype(mx.float32)
        own = own - mx.logsumexp(own, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(own, tokens[rows][:, None], axis=-1)[:, 0]
        if any(wanted[i] for i in told):
            count = min(MAX_TOP, own.shape[-1])
            # always as many, so that what ties at the last place does not depend on the company
            top_ids = mx.argpartition(own, kth=-count, axis=-1)[:, -count:]
            top = mx.take_along_axis(own, top_ids, axis=-1)
    if steered:
        rows = mx.array(steered)
        surprise = surprises(logits[rows], tokens[rows], [draws[i] for i in steered])
    return Measures(len(draws), tuple(wanted), told, steered, chosen, top, top_ids, surprise)


def _bounded(logprob: float) -> float:
    """A finite number, as JSON has no other."""
    return max(NO_LOGPROB, logprob)
