"""Case 13: `stream_options.include_usage` gives one last chunk, without choices and with all counts."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": ["hi", "ho"]},
}


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("path", BODIES)
async def test_usage_comes_last_where_it_is_asked_for(tiny: Path, path: str, num_choices: int) -> None:
    sampler = ScriptedSampler({1: tokens_of("abc")}, choices=num_choices)
    body = BODIES[path] | {"seed": 1, "n": num_choices, "cache_prompt": False}
    async with served(tiny, sampler=sampler) as service:
        whole = await service.answer(path, body)
        stream = await service.stream(path, body | {"stream_options": {"include_usage": True}})
        *before, last = stream.chunks
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["choices"] and not chunk.get("usage") for chunk in before)
        assert stream.done
        for options in ({}, {"include_usage": False}, None):
            silent = await service.stream(path, body | {"stream_options": options})
            assert all(chunk["choices"] and "usage" not in chunk for chunk in silent.chunks)
