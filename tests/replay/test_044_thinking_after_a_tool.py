"""Case 44: what the reply begins with is read off the prompt, after a tool's result as anywhere."""

from pathlib import Path
from typing import Any

import pytest

from tests.replies import ADD, HI, answered, script
from tests.serving import served
from tests.templates import THINKING, THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How much?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "212"},
]


@pytest.mark.parametrize(
    ("template", "text", "fields", "reasoning"),
    [
        (THINKING, "I see.\n</think>\n\n212.", {}, "I see."),
        (THINKING, "212.", {"enable_thinking": False}, None),
        (THINKS_ITSELF, "<think>\nI see.\n</think>\n\n212.", {}, "I see."),
        (THINKS_ITSELF, "212.", {}, None),
    ],
)
async def test_after_a_result(
    tmp_path: Path, template: str, text: str, fields: dict[str, Any], reasoning: str | None
) -> None:
    async with served(checkpoint(tmp_path, template), sampler=script(text)) as service:
        choice = await answered(service, HI | {"messages": MESSAGES, "tools": [ADD]} | fields)
    assert choice["message"]["content"] == "212."
    assert choice["message"].get("reasoning_content") == reasoning
