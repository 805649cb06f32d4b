"""Case 12: where nobody asks for logprobs they are null, in every chunk and in the answer, and no empty object."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"max_tokens": 9, "temperature": 0}
BODIES = {CHAT: ASKED | {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: ASKED | {"prompt": "hi"}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nothing_is_told_that_is_not_asked_for(tiny: Path, path: str) -> None:
    async with served(tiny) as service:
        for nothing in ({}, {"logprobs": None}, {"logprobs": False}):
            [choice] = (await service.answer(path, BODIES[path] | nothing))["choices"]
            stream = await service.stream(path, BODIES[path] | nothing)
            assert choice["logprobs"] is None
            assert [entry["logprobs"] for entry in stream.entries()] == [None] * len(stream.entries())
