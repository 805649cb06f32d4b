"""Requests for embeddings, and what an engine makes of them."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from engine.plan import PrefillPlan
from engine.request import Embedded, Pooling, Request
from tests.engines import Watched

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def asked(watched: Watched, name: str, length: int, pooling: Pooling = "last", **options) -> Request:
    """A request for the embedding of a made-up prompt, the same for the same length."""
    whole = watched.engine.pooler.embedding
    assert whole is not None, "the model gives no embeddings"
    embedding = replace(whole, pooling=pooling, **options)
    return replace(watched.request(name, length, 1, seed=length), embedding=embedding)


def vectors(watched: Watched, requests: Sequence[Request], size: int = 0) -> list[np.ndarray]:
    """The vectors of `requests`, whose prompts are stored in one forward or, with a `size`, one after the other in
    pieces of so many tokens.
    """
    engine, found = watched.engine, {}
    rows = [engine.submit(request) for request in requests]
    plan = PrefillPlan(fixed_tokens=size or 1000)
    while live := [row for row in rows if row.finish_reason is None]:
        events = engine.prefill(plan.pieces(live[: 1 if size else None], decoding=False))
        found |= {event.row.request.id: np.array(event.vector) for event in events if isinstance(event, Embedded)}
    for row in rows:
        assert row.storage is None, "an ended row holds storage"
        assert row.pooled is None, "an ended row holds hidden states"
        assert not row.output, "a token was drawn"
    return [found[request.id] for request in requests]


def hidden(blocks, prompt: Sequence[int]) -> np.ndarray:
    """What mlx-lm's own `blocks` give before the head, `[n, size]`."""
    return np.array(blocks(mx.array([list(prompt)]))[0].astype(mx.float32))
