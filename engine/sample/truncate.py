"""The truncations: which tokens may be drawn at all, judged by the untempered distribution.

Each works on what the ones before it left, in the order of `truncated`. They are thresholds on values, so that
neither ties nor the company's parameters matter, and leave at least `min_keep` tokens of those they found.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx

from engine.sample.rows import column, for_rows
from engine.sample.state import Draw

_SIDE = 1  # the bit of a distance that is set where a surprise is above the entropy


def truncated(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """`logits` `[B, vocab]` with minus infinity where a row's truncations allow no token."""
    logits = for_rows(logits, draws, lambda draw: draw.sampling.top_n_sigma > 0, _top_n_sigma)
    typical = [draw for draw in draws if draw.sampling.typical_p < 1]
    for limit in sorted({_limit(draw, logits.shape[-1]) for draw in typical}):
        # those with one limit at a time, so that sums run over as many numbers as they do alone
        uses = functools.partial(_is_typical, limit, logits.shape[-1])
        logits = for_rows(logits, draws, uses, functools.partial(_typical, limit))
    if any(0 < d.sampling.top_k < logits.shape[-1] or d.sampling.top_p < 1 for d in draws):
        logits = _above(logits, _ranked_floor(logits, draws))
    if any(draw.sampling.min_p > 0 for draw in draws):
        logits = _min_p(logits, draws)
    return for_rows(logits, draws, lambda draw: draw.chance < draw.sampling.xtc_probability, _xtc)


def _above(logits: mx.array, floor: mx.array) -> mx.array:
    return mx.where(logits >= floor, logits, -mx.inf)


def _top_n_sigma(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Keep what is within n standard deviations of the largest logit (Tang et al. 2024, "Top-nσ").

    What is masked already counts for nothing.
    """
    there = logits > -mx.inf
    count = there.sum(axis=-1, keepdims=True)
    mean = mx.where(there, logits, 0.0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(there, (logits - mean) ** 2, 0.0).sum(axis=-1, keepdims=True) / count
    width = column([draw.sampling.top_n_sigma for draw in draws]) * mx.sqrt(variance)
    return _above(logits, _lowered(logits.max(axis=-1, keepdims=True) - width, logits, draws))


def _typical(limit: int, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Of the `limit` largest, keep the fewest whose mass reaches p, those first whose surprise is nearest to the
    entropy (Meister et al. 2022, "Locally Typical Sampling").
    """
    candidates = _largest(logits, limit)
    total = mx.logsumexp(candidates, axis=-1, keepdims=True)
    log_p = candidates - total
    entropy = -mx.where(log_p > -mx.inf, mx.exp(log_p) * log_p, 0.0).sum(axis=-1, keepdims=True)
    ranked = mx.sort(_distances(log_p, entropy), axis=-1)
    distance = (ranked & 0xFFFFFFFE).view(mx.float32)
    mass = mx.exp(-entropy - mx.where((ranked & _SIDE) == 1, distance, -distance))
    until = mx.cumsum(mass, axis=-1)
    p_wanted = column([draw.sampling.typical_p for draw in draws])
    kept = (until - mass < p_wanted * until[:, -1:]).sum(axis=-1, keepdims=True)
    last = mx.maximum(kept, column(_least(draws, limit))) - 1
    farthest = mx.take_along_axis(ranked, last, axis=-1) | _SIDE
    logits = _above(logits, candidates[:, -1:])
    return mx.where((_distances(logits - total, entropy) | _SIDE) <= farthest, logits, -mx.inf)


def _distances(log_p: mx.array, entropy: mx.array) -> mx.array:
    """How far each surprise is from the entropy, as the bits of a float: of positive ones those sort as they do.

    The last of them says on which side, so that what is sorted alone still knows its probability.
    """
    distance = mx.abs(-log_p - entropy).view(mx.uint32)
    return (distance & 0xFFFFFFFE) | (-log_p > entropy).astype(mx.uint32)


def _is_typical(limit: int, vocab_size: int, draw: Draw) -> bool:
    return draw.sampling.typical_p < 1 and _limit(draw, vocab_size) == limit


def _ranked_floor(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """The smallest logit that top-k (Fan et al. 2018) and top-p (Holtzman et al. 2019) keep in each row: `[B, 1]`.

    Top-p keeps the fewest of the k largest whose mass reaches p of theirs, and always the largest.
    """
    vocab_size = logits.shape[-1]
    limits = [_limit(draw, vocab_size) for draw in draws]
    largest = _largest(logits, max(limits))
    in_top_k = mx.arange(largest.shape[-1])[None] < column(limits)
    mass = mx.where(in_top_k, mx.exp(largest - largest[:, :1]), 0.0)
    until = mx.cumsum(mass, axis=-1)
    p = column([draw.sampling.top_p for draw in draws])
    in_top_p = (p >= 1) | (until - mass < p * until[:, -1:])
    kept = (in_top_k & in_top_p).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(largest, mx.maximum(kept, column(_least(draws, vocab_size))) - 1, axis=-1)


def _min_p(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Keep what has at least p of the largest probability (Nguyen et al. 2024)."""
    ratio = column([draw.sampling.min_p for draw in draws])
    return _above(logits, _lowered(logits.max(axis=-1, keepdims=True) + mx.log(ratio), logits, draws))


def _xtc(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Remove all tokens whose probability reaches the threshold but the least likely of them (p-e-w 2024, "Exclude
    Top Choices", text-generation-webui #6335). Line breaks and ends of sequence stay, as in mlx-lm.
    """
    p = mx.softmax(logits, axis=-1)
    reaches = (logits > -mx.inf) & (p >= column([draw.sampling.xtc_threshold for draw in draws]))
    removed = reaches & (p > mx.where(reaches, p, mx.inf).min(axis=-1, keepdims=True))
    longest = max(len(draw.excepted) for draw in draws)
    if longest:
        vocab_size = logits.shape[-1]  # where the lists of the others are filled up
        excepted = mx.array([[*d.excepted, *[vocab_size] * (longest - len(d.excepted))] for d in draws])
        spared = mx.zeros((len(draws), vocab_size + 1), mx.bool_)
        removed = removed & ~mx.put_along_axis(spared, excepted, mx.array(True), axis=-1)[:, :vocab_size]
    left = ((logits > -mx.inf) & ~removed).sum(axis=-1, keepdims=True)
    enough = left >= column(_least(draws, logits.shape[-1]))
    return mx.where(removed & enough, -mx.inf, logits)


def _limit(draw: Draw, vocab_size: int) -> int:
    """How many of the largest logits top-k keeps."""
    asked = draw.sampling.top_k if 0 < draw.sampling.top_k < vocab_size else vocab_size
    return min(max(asked, draw.sampling.min_keep), vocab_size)


def _least(draws: Sequence[Draw], vocab_size: int) -> list[int]:
    """How many tokens each row keeps at least."""
    return [min(max(draw.sampling.min_keep, 1), vocab_size) for draw in draws]


def _lowered(floor: mx.array, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """`floor` `[B, 1]`, or what the rows keep at least where that is lower."""
    least = _least(draws, logits.shape[-1])
    if max(least) == 1:
        return floor
    return mx.minimum(floor, mx.take_along_axis(_largest(logits, max(least)), column(least) - 1, axis=-1))


def _largest(logits: mx.array, count: int) -> mx.array:
    """The `count` largest logits of each row, the largest first."""
    values = logits if count == logits.shape[-1] else mx.topk(logits, count, axis=-1)
    return mx.sort(values, axis=-1)[:, ::-1]
