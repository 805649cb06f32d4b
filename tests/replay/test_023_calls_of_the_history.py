"""Case 23: a call that comes back with arguments that are no JSON is a 400 that names its message, or is read."""

from pathlib import Path
from typing import Any

import pytest

from tests.replies import CALL, HI, TOOLS, script
from tests.serving import CHAT, MESSAGES, RESPONSES, served, tokens_of
from tests.templates import PLAIN, checkpoint

pytestmark = pytest.mark.anyio

CUT = len(tokens_of(CALL[: CALL.index("}")]))
PARAMETERS: dict[str, Any] = {"type": "object"}
AGAIN = {"role": "user", "content": "again"}


@pytest.mark.parametrize("arguments", ["{", '{"a": 2', "[1]", "5", "null", "{'a': 1}"])
async def test_arguments_that_are_no_object(tmp_path: Path, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [*HI["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, AGAIN]
    async with served(checkpoint(tmp_path, PLAIN), sampler=script("Yes")) as service:
        response = await service.post(CHAT, HI | {"messages": turns})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1].tool_calls")


async def test_a_call_that_was_cut_comes_back(tmp_path: Path) -> None:
    sampler = script(CALL)
    async with served(checkpoint(tmp_path, PLAIN), sampler=sampler, seed=0) as service:
        whole = await service.answer(CHAT, TOOLS | {"max_tokens": CUT})
        said = whole["choices"][0]["message"]
        response = await service.post(CHAT, TOOLS | {"messages": [*HI["messages"], said, AGAIN]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1].tool_calls")

        tool = {"name": "add", "input_schema": PARAMETERS}
        asked = {"messages": HI["messages"], "max_tokens": CUT, "tools": [tool]}
        message = await service.answer(MESSAGES, asked)
        turns = [*HI["messages"], {"role": "assistant", "content": message["content"]}, AGAIN]
        await service.answer(MESSAGES, asked | {"messages": turns})

        asked = {"input": "hi", "max_output_tokens": CUT, "tools": [{"type": "function", "name": "add"}]}
        first = await service.answer(RESPONSES, asked)
        await service.answer(RESPONSES, asked | {"input": [AGAIN], "previous_response_id": first["id"]})
        await service.answer(RESPONSES, asked | {"input": [*HI["messages"], *first["output"], AGAIN]})
        kept, sent = (row.request.prompt for row in service.engine.rows[-2:])
        assert kept == sent
        assert "add" not in service.engine.language.tokens.decode(sent).partition("again")[0].partition("hi")[2]
