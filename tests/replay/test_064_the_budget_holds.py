"""Cases 64 and 66: however requests come and end, the prompt cache stays within its bytes, and gives them back."""

import asyncio
import gc
from pathlib import Path

import mlx.core as mx
import pytest

from engine.size import Size
from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio

BUDGET = Size("1MB")
NUM_PROMPTS = 200


async def test_two_hundred_distinct_prompts(tiny: Path) -> None:
    async with served(tiny, prompt_cache_bytes=BUDGET, prefill_chunk_size=32) as service:

        async def ask(number: int) -> None:
            prompt = [(number * 31 + 7 * i + i // 9) % 250 for i in range(40 + number % 160)]
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            match number % 4:
                case 0:
                    await service.answer(COMPLETIONS, body)
                case 1:
                    await service.stream(COMPLETIONS, body)
                case 2:
                    client = asyncio.ensure_future(service.post(COMPLETIONS, body))
                    await asyncio.wait({client}, timeout=0.005)
                    client.cancel()
                    await asyncio.gather(client, return_exceptions=True)
                case 3:
                    await service.answer(COMPLETIONS, body | {"cache_salt": str(number)})

        await ask(1)
        await service.app.state.service.models.default.bridge.reset_cache()
        gc.collect()
        before = mx.get_active_memory()
        for start in range(0, NUM_PROMPTS, 4):
            await asyncio.gather(*map(ask, range(start, start + 4)))
            stats = await service.app.state.service.models.default.bridge.cache_stats()
            assert 0 < stats.num_bytes <= BUDGET
        assert stats.evictions > 0
        await service.exchanges_ended()
        await service.app.state.service.models.default.bridge.reset_cache()
        service.engine.prompts.check()
        assert service.engine.prompts.stats().num_blocks == 0
        gc.collect()
        assert mx.get_active_memory() <= before + 65536
