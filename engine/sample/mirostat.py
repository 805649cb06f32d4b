"""Mirostat (Basu et al. 2021): truncation that steers how surprising the drawn tokens are.

A row's bound `mu` follows the surprise of what was drawn (`SamplerState.observe`), so that it averages `tau` bits.
Surprise is that of the untempered distribution before the truncation, as in the paper; llama.cpp measures it after
temperature and truncation.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from engine.sample.rows import for_rows
from engine.sample.state import Draw

NUM_CANDIDATES = 100  # the paper's m: how many of the most likely tokens version 1 estimates from


def bounded(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """`logits` `[B, vocab]` with minus infinity where a row's bound allows no token; the likeliest stays."""
    logits = for_rows(logits, draws, lambda draw: draw.sampling.mirostat == 1, _first)
    return for_rows(logits, draws, lambda draw: draw.sampling.mirostat == 2, _second)


def _second(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Version 2 keeps the tokens whose surprise is at most `mu`."""
    mu = mx.array([draw.mu for draw in draws])[:, None]
    floor = mx.logsumexp(logits, axis=-1, keepdims=True) - mu * math.log(2)
    return mx.where(logits >= mx.minimum(floor, logits.max(axis=-1, keepdims=True)), logits, -mx.inf)


def _first(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Version 1 keeps the k likeliest tokens, k being what Zipf's law, fitted to the likeliest, gives for `mu`."""
    mu = mx.array([draw.mu for draw in draws])[:, None]
    vocab_size = logits.shape[-1]
    largest = mx.sort(logits, axis=-1)[:, ::-1]
    candidates = largest[:, : min(NUM_CANDIDATES, vocab_size)]
    ranks = mx.arange(1, candidates.shape[-1], dtype=mx.float32)[None]
    falls = candidates[:, :-1] - candidates[:, 1:]
    steps = mx.where(candidates[:, 1:] > -mx.inf, mx.log((ranks + 1) / ranks), 0.0)
    fitted = mx.where(steps > 0, steps * falls, 0.0).sum(axis=-1, keepdims=True)
    exponent = mx.maximum(fitted / mx.maximum((steps * steps).sum(axis=-1, keepdims=True), 1e-9), 1e-3)
    excess = exponent - 1
    excess = mx.where(mx.abs(excess) < 1e-3, 1e-3, excess)  # at 1 the formula below has a gap
    log_count = mx.log(excess / (1 - mx.exp(-excess * math.log(vocab_size)))) + mu * math.log(2)
    count = mx.exp(mx.clip(log_count / exponent, 0.0, math.log(vocab_size)))
    last = mx.clip(count.astype(mx.int32), 1, vocab_size) - 1
    return mx.where(logits >= mx.take_along_axis(largest, last, axis=-1), logits, -mx.inf)
