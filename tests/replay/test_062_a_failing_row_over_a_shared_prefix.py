"""Case 62: a row that fails over a shared prefix fails alone; prefix and engine serve the next ones as before."""

import asyncio
from pathlib import Path

import pytest

from engine.sample.chain import sample
from engine.sample.state import noise_key
from tests.serving import COMPLETIONS, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

PREFIX = [(7 * i + i // 9) % 250 for i in range(40)]
BROKEN = noise_key(666, 0, 1)


def breaking(logits, draws):
    if any(draw.key == BROKEN for draw in draws):
        raise RuntimeError("made to fail")
    return sample(logits, draws)


def body(user: int) -> dict[str, object]:
    tail = [(user * 13 + i) % 250 for i in range(3 + user)]
    return {"prompt": PREFIX + tail, "seed": user, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3"])
async def test_four_at_once(tmp_path: Path, family: str) -> None:
    folder = write_zoo(tmp_path, family)
    async with served(folder, no_prompt_cache=True) as service:
        cold = [(await service.answer(COMPLETIONS, body(user)))["choices"] for user in range(4)]
    async with served(folder, sampler=breaking, parallel=4, prefill_chunk_size=32) as service:
        for _ in range(3):
            failed = await service.post(COMPLETIONS, body(0) | {"seed": 666})
            assert failed.status_code == 500
            answers = await asyncio.gather(*(service.answer(COMPLETIONS, body(user)) for user in range(4)))
            assert [answer["choices"] for answer in answers] == cold
        assert all(answer["timings"]["cache_n"] >= 32 for answer in answers)
        service.engine.prompts.check()
