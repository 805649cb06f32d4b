"""Case 52: users who share a prefix get what each would get alone, one after the other and all at once."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import CHAT, served
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

NUM_USERS = 12
SYSTEM = "You answer in verse, and you never say so."


def body(user: int) -> dict[str, object]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{user}: " + "tell me more " * (user % 5)},
    ]
    return {"messages": messages, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize("cache_dtype", ["auto", "float32"])
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("gemma3_text", 8), ("gemma3_text", 16)])
async def test_nobody_reads_what_is_another_s(
    tmp_path: Path, family: str, window: int | None, cache_dtype: str
) -> None:
    folder = write_checkpoint(tmp_path, family, **({"sliding_window": window} if window else {}))
    async with served(folder, cache_dtype=cache_dtype, no_prompt_cache=True) as service:
        cold = [(await service.answer(CHAT, body(user)))["choices"] for user in range(NUM_USERS)]
    async with served(folder, cache_dtype=cache_dtype, parallel=NUM_USERS) as service:
        for user in range(NUM_USERS):
            answer = await service.answer(CHAT, body(user))
            assert answer["choices"] == cold[user]
            assert (answer["timings"]["cache_n"] >= len(SYSTEM)) == (user > 0)
    async with served(folder, cache_dtype=cache_dtype, parallel=NUM_USERS) as service:
        answers = await asyncio.gather(*(service.answer(CHAT, body(user)) for user in range(NUM_USERS)))
        assert [answer["choices"] for answer in answers] == cold
