"""Case 69: under pressure cold prefixes go and requests wait, and only what can never fit is refused."""

import asyncio
from pathlib import Path

import pytest

from engine.size import Bound
from tests.engines import BACKENDS, Watched
from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio


def body(user: int, num_tokens: int) -> dict[str, object]:
    prompt = [(31 * user + 7 * i + i // 9) % 250 for i in range(num_tokens)]
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_long_chats_after_a_crowd(tiny: Path, backend: str) -> None:
    budget = Bound(
        Watched(tiny, cache_dtype="float32", decode_storage_backend=backend).engine.memory.row_bytes(900)
    )
    async with served(
        tiny, kv_cache_budget=budget, cache_dtype="float32", decode_storage_backend=backend
    ) as service:
        for _ in range(2):
            crowd = await asyncio.gather(
                *(service.post(COMPLETIONS, body(user, 80 + 60 * user)) for user in range(12))
            )
            assert [response.status_code for response in crowd] == [200] * 12
            await service.answer(COMPLETIONS, body(99, 890))
            refused = await service.post(COMPLETIONS, body(98, 1500))
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "memory_exceeded")
            await service.answer(COMPLETIONS, body(97, 890))
        await service.exchanges_ended()
        engine = service.engine
        assert engine.prompts.stats().evictions > 0
        await service.app.state.service.models.default.bridge.reset_cache()
        assert engine.memory.spare_bytes() == budget.num_bytes
