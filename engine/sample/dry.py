"""DRY, "don't repeat yourself" (p-e-w 2024, text-generation-webui #5677; as in llama.cpp): which tokens would go
on with a repetition, and what is taken off their logits for that.

The longer the repetition, the more: multiplier * base ^ (length - allowed length). No repetition reaches over a
sequence breaker. Token ids alone; what text they have is known to `engine/text/breakers.py`.
"""

import math
from collections.abc import Mapping, Sequence

from engine.request import Sampling

# Tokens with which a sequence breaker can begin, each with what must follow it (nothing: the token is enough).
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]

_LARGEST_LOG = math.log(3.0e38)


def dry_penalties(tokens: Sequence[int], sampling: Sampling, breakers: Breakers) -> dict[int, float]:
    """What to take off the logits of tokens that would go on with a repetition at the end of `tokens`.

    `tokens` are those of the window, the last of them the last.
    """
    allowed = sampling.dry_allowed_length
    limit = _reach(tokens, breakers)
    if len(tokens) <= allowed or limit < allowed:
        return {}
    backwards = tokens[::-1]
    longest: dict[int, int] = {}
    for distance, length in enumerate(_overlaps(backwards)):
        length = min(length, limit)
        token = backwards[distance - 1]
        if distance and length >= allowed and () not in breakers.get(token, ()):
            longest[token] = max(longest.get(token, 0), length)
    return {token: _penalty(sampling, length - allowed) for token, length in longest.items()}


def _penalty(sampling: Sampling, exponent: int) -> float:
    """Bounded by what float32 holds."""
    if sampling.dry_base > 1:
        exponent = min(exponent, int(_LARGEST_LOG / math.log(sampling.dry_base)))
    return min(sampling.dry_multiplier * sampling.dry_base**exponent, 3.0e38)


def _reach(tokens: Sequence[int], breakers: Breakers) -> int:
    """How many tokens at the end come after the last sequence breaker."""
    for at in range(len(tokens) - 1, -1, -1):
        tails = breakers.get(tokens[at], ())
        complete = [len(tail) for tail in tails if tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail]
        if complete:
            return len(tokens) - 1 - at - max(complete)
    return len(tokens)


def _overlaps(tokens: Sequence[int]) -> list[int]:
    """How long `tokens` from each index on agree with their own beginning: the Z-function (Gusfield 1997)."""
    lengths = [len(tokens)] + [0] * (len(tokens) - 1)
    start = stop = 0
    for i in range(1, len(tokens)):
        length = min(lengths[i - start], stop - i) if i < stop else 0
        while i + length < len(tokens) and tokens[length] == tokens[i + length]:
            length += 1
        lengths[i] = length
        if i + length > stop:
            start, stop = i, i + length
    return lengths
