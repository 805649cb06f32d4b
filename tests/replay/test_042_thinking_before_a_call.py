"""Cases 42 and 46: reasoning, content and calls are apart, whichever ways of writing them meet."""

from pathlib import Path

import pytest

from tests.engine.text.markups import FAMILIES, THOUGHTS, TOOL, markup_of, tool_calls_of
from tests.replies import CALL, TOOLS, answered, called, chunkings, reply, script
from tests.serving import served
from tests.templates import THINKS_ITSELF, checkpoint

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("between", ["", "\n\n"])
async def test_a_thought_and_a_call(tmp_path: Path, between: str) -> None:
    text = f"<think>plan</think>{between}{CALL}"
    async with served(checkpoint(tmp_path, THINKS_ITSELF), sampler=script(text)) as service:
        choice = await answered(service, TOOLS)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "plan"
    assert called(choice) == [("add", {"a": 2})]


@pytest.mark.parametrize("thought", [name for name in THOUGHTS if name != "none"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
def test_every_reasoning_with_every_parser(name: str, thought: str) -> None:
    tags, text = THOUGHTS[thought]
    for chunks in chunkings(text + FAMILIES[name].call):
        said, reasoned, calls, reason = reply(markup_of(name, tags), tool_calls_of(name), chunks, tools=[TOOL])
        assert (said, reasoned, [one for one, _ in calls], reason) == ("", "plan", ["add"], "tool_calls"), chunks
