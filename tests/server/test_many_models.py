"""Many clients over more models than may be loaded: each has its own model's answer, and memory its bound."""

import asyncio
import gc
import random
from pathlib import Path

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.size import Bound
from tests.serving import COMPLETIONS, PATIENCE_S
from tests.several import BODY, Loads, alone, several, write_several

pytestmark = pytest.mark.anyio

NUM_REQUESTS, NUM_CLIENTS = 200, 8
MOST_BYTES, LEFT_BYTES = 1 << 30, 16 << 20
SHARES = {"tiny": 10, "window": 10, "hybrid": 10, "smollm2": 1}


class Measured(Loads):
    """Loads that note how much MLX holds when a model is there, and how many are."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self.most_live = 0

    def __call__(self, config: EngineConfig) -> Engine:
        engine = super().__call__(config)
        self.most_bytes = max(self.most_bytes, mx.get_active_memory() + mx.get_cache_memory())
        self.most_live = max(self.most_live, len(self.live))
        return engine


async def test_200_requests_of_8_clients_over_4_models(tmp_path: Path, real_checkpoint: Path) -> None:
    folders = {**write_several(tmp_path), "smollm2": real_checkpoint}
    expected, loads, chance = await alone(folders), Measured(), random.Random(0)
    before_bytes = mx.get_active_memory()
    names = chance.choices(list(SHARES), list(SHARES.values()), k=NUM_REQUESTS)
    waiting = iter(names)
    answered = 0
    options = {"max_queue_depth": NUM_CLIENTS}
    async with several(folders, loads, models_memory=Bound(MOST_BYTES), engine=options) as service:

        async def one_client() -> None:
            nonlocal answered
            for name in waiting:
                answer = await service.answer(COMPLETIONS, {**BODY, "model": name})
                assert answer["model"] == name
                assert answer["choices"][0]["text"] == expected[name]
                answered += 1

        async with asyncio.timeout(4 * PATIENCE_S):
            await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))
        places = service.app.state.service.models.places
        assert sum(place.claim_bytes for place in places) <= MOST_BYTES
    assert answered == NUM_REQUESTS
    assert loads.most_live == 2
    assert loads.most_bytes - before_bytes <= MOST_BYTES
    assert loads.live == set()
    gc.collect()
    assert mx.get_active_memory() - before_bytes < LEFT_BYTES, "models that were unloaded are still held"
