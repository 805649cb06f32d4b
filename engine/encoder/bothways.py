"""A decoder of mlx-lm's as an encoder: its checkpoint was trained with every token seeing all others.

The model is used unmodified. What masks its attention is the cache that it asks, and here that masks nothing, or
what is outside of a window around each token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from engine.cache.adapter import layer_kinds, select_before_head
from engine.encoder.encoder import Encoder, starts_of, within
from engine.errors import UnsupportedModel

# Families that are another one seen both ways.
ALIASES = {"llama_bidirec": "llama"}


def sees_both_ways(said: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for that."""
    both = said.get("use_bidirectional_attention") in (True, "all") or said.get("is_causal") is False
    return both or said.get("model_type") in ALIASES


class Everywhere:
    """One layer's cache where nothing is cached: a token sees those before it and those behind."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """As `within`."""
        return within(num_tokens, window_size)


class BothWays(Encoder):
    """`model` is mlx-lm's. Raises UnsupportedModel where it keeps more than keys and values."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        kinds = layer_kinds(model)
        if strange := {kind.cache_class for kind in kinds if kind.parts or not kind.is_attention}:
            raise UnsupportedModel(f"layers that keep {', '.join(sorted(strange))} cannot see both ways")
        self._num_caches = len(kinds)
        self._selection = select_before_head(model, vocab_size)

    def states(self, ids: mx.array, lengths: Sequence[int]) -> mx.array:
        found = []
        for start, stop in starts_of(lengths):
            with self._selection.of([], axis=1) as hidden:
                self.model(ids[:, start:stop], cache=[Everywhere() for _ in range(self._num_caches)])
                found.append(hidden[-1])
        return mx.concatenate(found, axis=1) if len(found) > 1 else found[0]
