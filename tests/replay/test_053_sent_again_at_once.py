"""Case 53: a prompt that is sent again at once, or while the first is still running, is not computed twice."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio

PIECE = 16
NUM_PROMPT = PIECE * 12 + 3
BODY = {
    "prompt": [(7 * i + i // 9) % 250 for i in range(NUM_PROMPT)],
    "temperature": 0,
    "max_tokens": 30,
    "ignore_eos": True,
}


@pytest.mark.parametrize("num_ticks", [0, 1, 5, 12, 13, 20])
async def test_at_any_moment_of_the_first(tiny: Path, num_ticks: int) -> None:
    async with served(tiny, prefill_chunk_size=PIECE) as service:
        service.gate.shut()
        first = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
        await service.gate.engine_held()
        if num_ticks:
            service.gate.let(num_ticks)
            await service.gate.engine_held()
        second = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
        await service.submitted(2)
        service.gate.open()
        answers = await asyncio.gather(first, second)
        assert answers[0]["choices"] == answers[1]["choices"]
        computed = sum(tick.prefill_tokens for tick in service.engine.ticks)
        assert computed == sum(answer["timings"]["prompt_n"] for answer in answers)
        assert computed <= NUM_PROMPT + PIECE


async def test_right_after_the_first(tiny: Path) -> None:
    async with served(tiny) as service:
        for repeat in range(3):
            answer = await service.answer(COMPLETIONS, BODY)
            assert answer["timings"]["cache_n"] == (NUM_PROMPT // PIECE * PIECE if repeat else 0)
