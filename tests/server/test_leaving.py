"""Clients that leave at any moment end their own rows; everybody else gets what they get alone."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.serving import COMPLETIONS, Served, frames, served

pytestmark = pytest.mark.anyio


def body(i: int) -> dict[str, Any]:
    prompt = [(7 * i + j) % 250 for j in range(3 + 5 * (i % 7))]
    return {
        "prompt": prompt,
        "temperature": 1,
        "seed": i,
        "max_tokens": 8 + i % 5,
        "ignore_eos": True,
        "n": 1 + i % 2,
    }


async def stay(service: Served, i: int) -> Any:
    return [(c["text"], c["finish_reason"]) for c in (await service.answer(COMPLETIONS, body(i)))["choices"]]


async def leave_stream(service: Served, i: int, num_frames: int) -> None:
    async with service.client.stream("POST", COMPLETIONS, json=body(i) | {"stream": True}) as response:
        async for _ in frames(response):
            num_frames -= 1
            if num_frames <= 0:
                break


async def leave_whole(service: Served, i: int, num_turns: int) -> None:
    """Leave after some turns of the event loop."""
    task = asyncio.ensure_future(service.post(COMPLETIONS, body(i)))
    for _ in range(num_turns):
        await asyncio.wait([task], timeout=0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_at_any_moment(tiny: Path, seed: int, lookahead: bool) -> None:
    chance = random.Random(seed)
    async with served(tiny, lookahead=lookahead, prefill_chunk_size=16, max_queue_depth=100) as service:
        alone = [await stay(service, i) for i in range(8)]
        works = [stay(service, i) for i in range(8)]
        works += [leave_stream(service, i, chance.randrange(12)) for i in range(8)]
        works += [leave_whole(service, i, chance.randrange(60)) for i in range(8)]
        chance.shuffle(works)
        results = await asyncio.gather(*works)
        assert sorted(r for r in results if r is not None) == sorted(alone)
