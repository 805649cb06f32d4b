"""Case 85: two prompts of different lengths at once on a hybrid model: states of unequal history never meet."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

PROMPTS = ("ten tokens", "twenty-six of them, roughly")


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "falcon_h1", "jamba"])
async def test_each_answer_is_its_own(tmp_path: Path, family: str) -> None:
    async with served(write_zoo(tmp_path / family, family)) as service:
        bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]
        alone = [(await service.answer(COMPLETIONS, body))["choices"] for body in bodies]
        together = await asyncio.gather(*(service.answer(COMPLETIONS, body) for body in bodies))
        assert [answered["choices"] for answered in together] == alone
        assert alone[0][0]["text"] != alone[1][0]["text"]
