"""Cases 50 and 60: the same prompt again gives the same answer, and what is called cached was not computed."""

from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 200])
async def test_every_length_of_prompt(tiny: Path, num_prompt: int) -> None:
    body = {"prompt": [(11 * i + 5) % 250 for i in range(num_prompt)], "temperature": 0, "max_tokens": 12}
    async with served(tiny, portable=True, no_prompt_cache=True) as service:
        cold = await service.answer(COMPLETIONS, body)
    async with served(tiny, portable=True) as service:
        for repeat in range(3):
            service.engine.ticks.clear()
            answer = await service.answer(COMPLETIONS, body)
            assert answer["choices"] == cold["choices"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == ((num_prompt - 1) // 16 * 16 if repeat else 0)
            computed = sum(tick.prefill_tokens for tick in service.engine.ticks)
            assert computed == num_prompt - cached == answer["timings"]["prompt_n"]
