"""Case 70: what the prompt cache could drop never counts against a request, nor against what it is told."""

from pathlib import Path

import pytest

from engine.size import Bound
from tests.engines import BACKENDS, Watched
from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_full_cache_refuses_nothing_and_delays_nobody(tiny: Path, backend: str) -> None:
    budget = Bound(
        Watched(tiny, cache_dtype="float32", decode_storage_backend=backend).engine.memory.row_bytes(400)
    )
    async with served(
        tiny, kv_cache_budget=budget, cache_dtype="float32", decode_storage_backend=backend
    ) as service:
        engine = service.engine
        for user in range(60):
            prompt = [(31 * user + 7 * i + i // 9) % 250 for i in range(390)]
            at = len(engine.ticks)
            answered = await service.answer(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "ignore_eos": True})
            assert answered["usage"]["prompt_tokens"] == 390
            cached = answered["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert sum(tick.prefill_tokens for tick in engine.ticks[at:]) == 390 - cached
            engine.memory.check()
            assert engine.prompts.num_bytes <= budget.num_bytes
        small = {"prompt": [*range(100)], "max_tokens": 3, "ignore_eos": True}
        for _ in range(2):
            await service.answer(COMPLETIONS, small)
        assert engine.prompts.stats().hits > 0
        assert not any(tick.preempt for tick in engine.ticks)
