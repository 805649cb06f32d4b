"""The one sampler step: logits of all rows to one token each, with per-row parameters.

Order: truncations on the untempered distribution (top-k, then top-p over what it left, min-p), temperature,
draw. Greedy rows take the argmax. A stage that no row uses costs nothing, and no row's token depends on another
row: truncations are thresholds on values, so ties and the company's parameters do not matter.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.request import Sampling
from engine.sample.state import Draw

GREEDY_BELOW = 1e-5  # at lower temperatures float32 knows no second candidate, or overflows


def sample(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """One token id for each row: logits `[B, vocab]` to int32 `[B]`, unevaluated.

    The draw is the argmax of logits / temperature + Gumbel noise, which is a draw from the softmax (Gumbel-max;
    Maddison et al. 2014); noise is indexed by token id.
    """
    assert logits.shape[0] == len(draws), "one draw for each row of logits"
    greedy = mx.argmax(logits, axis=-1).astype(mx.int32)
    drawn = [i for i, draw in enumerate(draws) if draw.sampling.temperature >= GREEDY_BELOW]
    if not drawn:
        return greedy
    rows = logits[mx.array(drawn)].astype(mx.float32)
    settings = [draws[i].sampling for i in drawn]
    keys = mx.array([draws[i].key for i in drawn], mx.uint32)
    temperature = _column([setting.temperature for setting in settings])
    tokens = mx.argmax(_truncate(rows, settings) / temperature + _noise(keys, rows.shape[-1]), axis=-1)
    if len(drawn) == len(draws):
        return tokens.astype(mx.int32)
    return mx.put_along_axis(greedy, mx.array(drawn), tokens.astype(mx.int32), axis=0)


def _noise(keys: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise `[B, vocab]`, each row from its own key."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel(shape=(vocab_size,), key=key))(keys)
    return noise


def _truncate(logits: mx.array, settings: Sequence[Sampling]) -> mx.array:
    """Put minus infinity where a row's truncations allow no token."""
    floors = []
    if any(0 < s.top_k < logits.shape[-1] or s.top_p < 1 for s in settings):
        floors.append(_ranked_floor(logits, settings))
    if any(s.min_p > 0 for s in settings):
        ratio = _column([s.min_p for s in settings])
        floors.append(logits.max(axis=-1, keepdims=True) + mx.log(ratio))
    for floor in floors:
        logits = mx.where(logits >= floor, logits, -mx.inf)
    return logits


def _ranked_floor(logits: mx.array, settings: Sequence[Sampling]) -> mx.array:
    """The smallest logit that top-k and top-p keep in each row: `[B, 1]`.

    Top-p keeps the fewest of the k largest whose mass reaches p of theirs, and always the largest.
    """
    vocab_size = logits.shape[-1]
    limits = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in settings]
    most = max(limits)
    largest = logits if most == vocab_size else mx.topk(logits, most, axis=-1)
    largest = mx.sort(largest, axis=-1)[:, ::-1]
    in_top_k = mx.arange(most)[None] < _column(limits)
    mass = mx.where(in_top_k, mx.exp(largest - largest[:, :1]), 0.0)
    until = mx.cumsum(mass, axis=-1)
    top_p = _column([s.top_p for s in settings])
    in_top_p = (top_p >= 1) | (until - mass < top_p * until[:, -1:])
    kept = (in_top_k & in_top_p).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(largest, mx.maximum(kept, 1) - 1, axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None]
