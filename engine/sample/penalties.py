"""Bias and penalties: the stages that move the logits of single tokens.

What moves by how much is in the draws (`state.py`); the whole distribution is never looked at.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.sample.rows import column, for_rows, table
from engine.sample.state import Draw


def biased(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Add what the rows' requests ask to add to the logits of single tokens (OpenAI's `logit_bias`)."""
    return for_rows(logits, draws, lambda draw: draw.sampling.logit_bias, _bias)


def penalized(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Lower the logits of recent tokens, and then of those that would go on with a repetition.

    Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019); frequency takes off its
    value for every occurrence, presence once (OpenAI). DRY takes off what `dry.py` says (p-e-w 2024).
    """
    logits = for_rows(logits, draws, lambda draw: draw.recent, _penalize)
    return for_rows(logits, draws, lambda draw: draw.dry, _take_off)


def _bias(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    pairs = [dict(draw.sampling.logit_bias) for draw in draws]
    ids, added = table([list(p) for p in pairs]), table([list(p.values()) for p in pairs])
    return mx.put_along_axis(logits, ids, mx.take_along_axis(logits, ids, axis=-1) + added, axis=-1)


def _penalize(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    settings = [draw.sampling for draw in draws]
    ids = table([list(draw.recent) for draw in draws])
    counts = table([list(draw.recent.values()) for draw in draws])
    values = mx.take_along_axis(logits, ids, axis=-1)
    repetition = column([s.repetition_penalty for s in settings])
    values = mx.where(values > 0, values / repetition, values * repetition)
    values = values - counts * column([s.frequency_penalty for s in settings])
    values = values - column([s.presence_penalty for s in settings])
    return mx.put_along_axis(logits, ids, values, axis=-1)


def _take_off(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    ids = table([list(draw.dry) for draw in draws])
    values = mx.take_along_axis(logits, ids, axis=-1) - table([list(draw.dry.values()) for draw in draws])
    return mx.put_along_axis(logits, ids, values, axis=-1)
