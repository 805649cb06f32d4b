"""Cases 34 and 35: arguments that do not parse are text in a stream that ends well, in every family."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.text.markups import FAMILIES, TOOL, long_call, markup_of, tool_calls_of
from tests.replies import TOOLS, answered, reply, script
from tests.serving import served
from tests.templates import HARMONY, PLAIN, checkpoint

pytestmark = pytest.mark.anyio

ESCAPES = '<tool_call>{"name": "add", "arguments": {"re":"\\d+","p":"C:\\new"}}</tool_call>'
CHANNEL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b" 3}<|call|>'


@pytest.mark.parametrize(("template", "text"), [(PLAIN, ESCAPES), (HARMONY, CHANNEL)])
async def test_the_stream_survives(tmp_path: Path, template: str, text: str) -> None:
    async with served(checkpoint(tmp_path, template), sampler=script(text)) as service:
        choice = await answered(service, TOOLS)
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


async def test_a_long_call_stays_as_far_as_it_was_told(tmp_path: Path) -> None:
    """Arguments that are told while they are written cannot be taken back; what follows is text."""
    told = '{"p": "' + "x" * 100
    text = f'So: <tool_call>{{"name": "add", "arguments": {told}\\d+"}}}}</tool_call>'
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(text)) as service:
        choice = await answered(service, TOOLS)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": told + "\\"}
    assert choice["message"]["content"] == 'So:d+"}}'
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text_of", [lambda name: FAMILIES[name].call, long_call], ids=["short", "long"])
def test_every_cut_of_a_call_is_the_same_in_every_chunking(name: str, text_of: Callable[[str], str]) -> None:
    text = text_of(name)
    for length in range(1, len(text), 3):
        broken = text[:length] + "\\" + text[length + 1 :]
        results = [
            reply(markup_of(name), tool_calls_of(name), chunks, tools=[TOOL])
            for chunks in ([broken], list(broken), [broken[:length], broken[length:]])
        ]
        assert results[0] == results[1] == results[2]
