"""The one sampler step: logits of all rows to one token each, with per-row parameters.

Order: logit bias, penalties, grammar mask, truncations on the untempered distribution (top-k, then top-p over what
it left, min-p), temperature, draw. Greedy rows take the argmax. A stage that no row uses costs nothing, and no
row's token depends on another row: truncations are thresholds on values, so ties and the company's parameters do
not matter.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.kernels import native
from engine.request import Sampling
from engine.sample.state import Draw

GREEDY_BELOW = 1e-5  # at lower temperatures float32 knows no second candidate, or overflows


def sample(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """One token id for each row: logits `[B, vocab]` to int32 `[B]`, unevaluated.

    The draw is the argmax of logits / temperature + Gumbel noise, which is a draw from the softmax (Gumbel-max;
    Maddison et al. 2014); noise is indexed by token id.
    """
    assert logits.shape[0] == len(draws), "one draw for each row of logits"
    logits = _mask(_penalize(_bias(logits, draws), draws), draws)
    greedy = native.argmax(logits)
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


def _bias(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Add what the rows' requests ask to add to the logits of single tokens."""
    rows = [i for i, draw in enumerate(draws) if draw.sampling.logit_bias]
    if not rows:
        return logits
    pairs = [dict(draws[i].sampling.logit_bias) for i in rows]
    ids, added = _table([list(p) for p in pairs]), _table([list(p.values()) for p in pairs])
    own = logits[mx.array(rows)].astype(mx.float32)
    return _with_rows(logits, rows, mx.put_along_axis(own, ids, mx.take_along_axis(own, ids, axis=-1) + added, -1))


def _penalize(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Lower the logits of recent tokens.

    Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019); frequency takes off its
    value for every occurrence, presence once (OpenAI).
    """
    rows = [i for i, draw in enumerate(draws) if draw.recent]
    if not rows:
        return logits
    settings = [draws[i].sampling for i in rows]
    recent = [draws[i].recent for i in rows]
    ids, counts = _table([list(r) for r in recent]), _table([list(r.values()) for r in recent])
    own = logits[mx.array(rows)].astype(mx.float32)
    values = mx.take_along_axis(own, ids, axis=-1)
    repetition = _column([s.repetition_penalty for s in settings])
    values = mx.where(values > 0, values / repetition, values * repetition)
    values = values - counts * _column([s.frequency_penalty for s in settings])
    values = values - _column([s.presence_penalty for s in settings])
    return _with_rows(logits, rows, mx.put_along_axis(own, ids, values, axis=-1))


def _mask(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Put minus infinity where a row's grammar allows no token."""
    rows = [i for i, draw in enumerate(draws) if draw.allowed is not None]
    if not rows:
        return logits
    bits = np.frombuffer(b"".join(draws[i].allowed or b"" for i in rows), np.uint8).reshape(len(rows), -1)
    allowed = np.unpackbits(bits, axis=-1, count=logits.shape[-1], bitorder="little").view(np.bool_)
    own = logits if len(rows) == len(draws) else logits[mx.array(rows)].astype(mx.float32)
    return _with_rows(logits, rows, mx.where(mx.array(allowed), own, -mx.inf))


def _table(lists: Sequence[list[float]]) -> mx.array:
    """Lists of different lengths side by side; the shorter ones repeat their last entry, which changes nothing."""
    longest = max(map(len, lists))
    return mx.array([entries + entries[-1:] * (longest - len(entries)) for entries in lists])


def _with_rows(logits: mx.array, rows: Sequence[int], own: mx.array) -> mx.array:
    """`logits` in float32 with the rows `rows` replaced by `own`."""
    if len(rows) == logits.shape[0]:
        return own
    replaced = logits.astype(mx.float32)
    replaced[mx.array(list(rows))] = own
    return replaced


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
