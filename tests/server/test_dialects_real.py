"""The real SmolLM2 says the same in every chat dialect."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, MESSAGES, RESPONSES, served

pytestmark = [pytest.mark.anyio, pytest.mark.real]

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
}


async def test_an_answer_is_the_same_in_every_dialect(real_checkpoint: Path) -> None:
    async with served(real_checkpoint, decode_storage_backend="paged", temp=0.0) as service:
        chat = await service.answer(CHAT, ASKED)
        message = await service.answer(MESSAGES, ASKED)
        response = await service.answer(RESPONSES, {"input": ASKED["messages"], "max_output_tokens": 12})
    said = chat["choices"][0]["message"]["content"]
    assert "Paris" in said
    assert message["content"] == [{"type": "text", "text": said}]
    assert response["output"][0]["content"][0]["text"] == said
    assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"]
