"""Case 10: an answer cut by `max_tokens` says `length`: streamed or not, alone or in company, in every dialect."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of

pytestmark = pytest.mark.anyio

SCRIPT = "0123456789"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}


@pytest.mark.parametrize("company", [1, 4])
@pytest.mark.parametrize("path", BODIES)
async def test_every_cut_says_length(tiny: Path, path: str, company: int) -> None:
    sampler = ScriptedSampler({seed: tokens_of(SCRIPT) for seed in range(company)})
    async with served(tiny, sampler=sampler, parallel=company) as service:
        for max_tokens in range(1, len(SCRIPT) + 2):
            body = {**BODIES[path], "max_tokens": max_tokens}
            streams = await asyncio.gather(*(service.stream(path, {**body, "seed": s}) for s in range(company)))
            wholes = await asyncio.gather(*(service.answer(path, {**body, "seed": s}) for s in range(company)))
            reason = "length" if max_tokens <= len(SCRIPT) else "stop"
            for stream, whole in zip(streams, wholes, strict=True):
                assert stream.reasons() == [reason]
                assert stream.text() == SCRIPT[:max_tokens]
                [choice] = whole["choices"]
                assert choice["finish_reason"] == reason
                assert choice.get("text", choice.get("message", {}).get("content")) == SCRIPT[:max_tokens]
                assert whole["usage"]["completion_tokens"] == max_tokens
