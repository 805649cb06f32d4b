"""Case 49: an answer that is cut within its thought has empty content, its reasoning, and a count of it."""

from pathlib import Path

import pytest

from tests.replies import HI, answered, script
from tests.serving import CHAT, served
from tests.templates import THINKING, checkpoint

pytestmark = pytest.mark.anyio


async def test_nothing_but_a_thought(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, THINKING), sampler=script("x" * 40)) as service:
        body = HI | {"max_tokens": 20}
        choice = await answered(service, body)
        whole = await service.answer(CHAT, body)
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "x" * 20}
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
