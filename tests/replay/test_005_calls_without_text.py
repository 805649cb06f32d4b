"""Case 5: an assistant's turn that is a call and nothing else is a turn, on every chat surface."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, MESSAGES, RESPONSES, served
from tests.templates import PLAIN, checkpoint

pytestmark = pytest.mark.anyio

ARGUMENTS = {"a": 2}
FUNCTION = {"name": "add", "arguments": '{"a": 2}'}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ],
        "max_tokens": 2,
    },
    MESSAGES: {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": ARGUMENTS}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
        ],
        "max_tokens": 2,
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": "add"},
            {"type": "function_call", "call_id": "c", **FUNCTION},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "max_output_tokens": 2,
    },
}


async def test_all_surfaces_render_it_alike(tmp_path: Path) -> None:
    async with served(checkpoint(tmp_path, PLAIN)) as service:
        for path, body in BODIES.items():
            await service.answer(path, body)
        prompts = {row.request.prompt for row in service.engine.rows}
    assert len(prompts) == 1
