"""Case 1: a turn without content renders as empty text, and a call's arguments reach the template as an object."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, served

pytestmark = pytest.mark.anyio

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ARGUMENTS = {"a": 2, "b": 3}


def conversation(content: Any, arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "79f2", "type": "function", "function": function}
    said = {} if content is ... else {"content": content}
    return [
        {"role": "user", "content": "what's 2+3?"},
        {"role": "assistant", **said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "79f2", "content": "5"},
    ]


async def test_no_content_in_any_form_is_empty_text(tiny: Path) -> None:
    async with served(tiny) as service:
        for content, arguments in itertools.product((None, "", [], ...), (ARGUMENTS, json.dumps(ARGUMENTS))):
            body = {"messages": conversation(content, arguments), "tools": [ADD], "max_tokens": 2}
            assert (await service.stream(CHAT, body)).done
            await service.answer(CHAT, body)
        prompts = {service.engine.language.tokens.decode(row.request.prompt) for row in service.engine.rows}
    assert len(prompts) == 1
    [prompt] = prompts
    assert "<|im_start|>assistant\nadd([('a', 2), ('b', 3)])<|im_end|>" in prompt
    assert "<|im_start|>tool\n5<|im_end|>" in prompt


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_null_is_empty_in_every_role(tiny: Path, role: str) -> None:
    async with served(tiny) as service:
        for content in (None, ""):
            turns = [{"role": role, "content": content}, {"role": "user", "content": "hi"}]
            await service.answer(CHAT, {"messages": turns, "max_tokens": 1})
        null, empty = service.engine.rows
        assert null.request.prompt == empty.request.prompt


async def test_arguments_that_are_not_json_are_refused_by_their_message(tiny: Path) -> None:
    async with served(tiny) as service:
        for arguments in ("{", '{"a":', "a=2"):
            body = {"messages": conversation(None, arguments), "tools": [ADD], "stream": True}
            response = await service.post(CHAT, body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages[1].tool_calls"
