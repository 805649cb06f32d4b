"""The one sampler step: logits of all rows to one token each, with per-row parameters.

Order: logit bias, penalties, grammar mask, truncations on the untempered distribution or mirostat in their place,
temperature, draw. Greedy rows take the argmax of what the mask leaves. A stage that no row uses costs nothing, and
no row's token depends on another row. docs/sampling.md has the stages with their sources.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.kernels import native
from engine.sample.mirostat import bounded
from engine.sample.penalties import biased, penalized
from engine.sample.rows import column, for_rows
from engine.sample.state import Draw
from engine.sample.truncate import truncated

GREEDY_BELOW = 1e-5  # at lower temperatures float32 knows no second candidate, or overflows


def sample(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """One token id for each row: logits `[B, vocab]` to int32 `[B]`, unevaluated.

    The draw is the argmax of logits / temperature + Gumbel noise, which is a draw from the softmax (Gumbel-max;
    Maddison et al. 2014); noise is indexed by token id.
    """
    assert logits.shape[0] == len(draws), "one draw for each row of logits"
    logits = _adjusted(logits, draws)
    greedy = native.argmax(logits)
    drawn = [i for i, draw in enumerate(draws) if not is_greedy(draw)]
    if not drawn:
        return greedy
    own = [draws[i] for i in drawn]
    rows = logits[mx.array(drawn)].astype(mx.float32)
    rows = for_rows(rows, own, lambda draw: draw.sampling.mirostat == 0, truncated)
    rows = bounded(rows, own)
    keys = mx.array([draw.key for draw in own], mx.uint32)
    tokens = mx.argmax(rows / _temperature(rows, own) + _noise(keys, rows.shape[-1]), axis=-1)
    if len(drawn) == len(draws):
        return tokens.astype(mx.int32)
    return mx.put_along_axis(greedy, mx.array(drawn), tokens.astype(mx.int32), axis=0)


def surprises(logits: mx.array, tokens: mx.array, draws: Sequence[Draw]) -> mx.array:
    """How surprising each row's token `[B]` was, in bits `[B]`, by the distribution that truncations judge."""
    logits = _adjusted(logits, draws).astype(mx.float32)
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - own) / math.log(2)


def is_greedy(draw: Draw) -> bool:
    """Whether the draw is the argmax."""
    return draw.sampling.temperature < GREEDY_BELOW


def _adjusted(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """The logits that all else judges: what the model says, moved by what the requests ask."""
    logits = penalized(biased(logits, draws), draws)
    return for_rows(logits, draws, lambda draw: draw.allowed is not None, _masked)


def _temperature(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """What each row's logits are divided by: `[B, 1]`.

    A dynamic temperature lies within its range of the request's, the higher the nearer the entropy of what may be
    drawn is to the largest it could have (kalomaze 2023; as in llama.cpp).
    """

    def dynamic(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
        settings = [draw.sampling for draw in draws]
        low = column([max(s.temperature - s.dynatemp_range, 0.0) for s in settings])
        high = column([s.temperature + s.dynatemp_range for s in settings])
        log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        entropy = -mx.where(log_p > -mx.inf, mx.exp(log_p) * log_p, 0.0).sum(axis=-1, keepdims=True)
        count = (logits > -mx.inf).sum(axis=-1, keepdims=True)
        share = mx.clip(entropy / mx.log(mx.maximum(count, 2)), 0.0, 1.0)
        return mx.maximum(
            low + (high - low) * share ** column([s.dynatemp_exponent for s in settings]), GREEDY_BELOW
        )

    fixed = column([draw.sampling.temperature for draw in draws])
    rows = [i for i, draw in enumerate(draws) if draw.sampling.dynatemp_range > 0]
    if not rows:
        return fixed
    moved = dynamic(logits[mx.array(rows)], [draws[i] for i in rows])
    return mx.put_along_axis(fixed, mx.array(rows)[:, None], moved, axis=0)


def _masked(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Put minus infinity where a row's grammar allows no token."""
    bits = np.frombuffer(b"".join(draw.allowed or b"" for draw in draws), np.uint8).reshape(len(draws), -1)
    allowed = np.unpackbits(bits, axis=-1, count=logits.shape[-1], bitorder="little").view(np.bool_)
    return mx.where(mx.array(allowed), logits, -mx.inf)


def _noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise `[B, vocab]`, each row from its own key."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel(shape=(vocab_size,), key=key))(keys)
    return noise
