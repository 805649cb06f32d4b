"""Case 37: a call cut by the bound on tokens is one as far as it came, in both modes alike, with `length`."""

from pathlib import Path

import pytest

from tests.engine.text.markups import FAMILIES, JSON_WAYS, TOOL, markup_of, tool_calls_of
from tests.replies import CALL, TOOLS, answered, reply, script
from tests.serving import served, tokens_of
from tests.templates import PLAIN, checkpoint

pytestmark = pytest.mark.anyio


LONG_CALL = CALL.replace("2", f'"{"x" * 200}"')


@pytest.mark.parametrize("call", [CALL, LONG_CALL], ids=["short", "long"])
async def test_cut_inside_the_arguments(tmp_path: Path, call: str) -> None:
    cut = call[: call.index("}") - 1]
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(call)) as service:
        choice = await answered(service, TOOLS | {"max_tokens": len(tokens_of(cut))})
    assert choice["message"]["content"] is None
    [made] = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": cut[cut.index('{"a"') :]}
    assert choice["finish_reason"] == "length"


async def test_cut_before_the_arguments(tmp_path: Path) -> None:
    cut = CALL[: CALL.index('{"a"')]
    async with served(checkpoint(tmp_path, PLAIN), sampler=script(CALL)) as service:
        choice = await answered(service, TOOLS | {"max_tokens": len(tokens_of(cut))})
    assert choice["message"] == {"role": "assistant", "content": cut}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_closing_is_invented(name: str) -> None:
    text = FAMILIES[name].call
    end = markup_of(name).calls[0][1]
    for length in range(1, len(text) - len(end)):
        said, _, called, reason = reply(
            markup_of(name), tool_calls_of(name), [text[:length]], tools=[TOOL], reason="length"
        )
        assert reason == "length"
        if called and name in JSON_WAYS:
            [(_, arguments)] = called
            assert said == ""
            assert arguments in text[:length]
        elif not called:  # the bare call of a coder is whole before the tag that is to follow
            assert said in (text[:length], "")
