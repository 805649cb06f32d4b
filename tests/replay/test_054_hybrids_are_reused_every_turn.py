"""Cases 54 and 65: a hybrid's conversation goes on from its last prompt at every turn, within the budget."""

from pathlib import Path

import pytest

from engine.size import Size
from tests.serving import CHAT, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

NUM_TURNS = 10
FAMILIES = ["qwen3_next", "mamba2", "recurrent_gemma"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_short_turns(tmp_path: Path, family: str) -> None:
    folder = write_zoo(tmp_path, family)
    cold = []
    for off in (True, False):
        async with served(folder, no_prompt_cache=off) as service:
            messages = [{"role": "system", "content": "Be brief."}]
            ended = 0
            for turn in range(NUM_TURNS):
                messages.append({"role": "user", "content": f"turn {turn}"})
                asked = {"messages": list(messages), "max_tokens": 6, "temperature": 0}
                answer = await service.answer(CHAT, asked)
                messages.append(answer["choices"][0]["message"])
                if off:
                    cold.append(answer["choices"])
                    continue
                assert answer["choices"] == cold[turn]
                assert answer["timings"]["cache_n"] == ended
                again = await service.answer(CHAT, asked)
                assert again["choices"] == cold[turn]
                ended = answer["usage"]["prompt_tokens"]
            service.engine.prompts.check()


@pytest.mark.parametrize("family", FAMILIES)
async def test_states_count(tmp_path: Path, family: str) -> None:
    budget = Size("40kB")
    async with served(write_zoo(tmp_path, family), prompt_cache_bytes=budget) as service:
        for user in range(30):
            messages = [{"role": "user", "content": f"{user} " * (user % 7 + 1)}]
            await service.answer(CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0})
            assert service.engine.prompts.stats().num_bytes <= budget
        assert service.engine.prompts.stats().evictions > 0
        service.engine.prompts.check()
