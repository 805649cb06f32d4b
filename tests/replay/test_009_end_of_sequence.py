"""Case 9: an answer that ends by itself says so: one terminal chunk with `stop`, then the end of the stream."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, ScriptedSampler, served, tokens_of
from tests.tiny import END_OF_TURN

pytestmark = pytest.mark.anyio

SCRIPTS = {num_tokens: [*tokens_of("abcdefgh")[:num_tokens], END_OF_TURN] for num_tokens in range(9)}


@pytest.mark.parametrize("no_batch", [False, True])
async def test_exactly_one_terminal_chunk(tiny: Path, no_batch: bool) -> None:
    async with served(tiny, sampler=ScriptedSampler(SCRIPTS), no_batch=no_batch) as service:
        for path, prompt in (
            (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
            (COMPLETIONS, {"prompt": "hi"}),
        ):
            streams = [service.stream(path, {**prompt, "seed": seed}) for seed in SCRIPTS]
            for seed, stream in zip(SCRIPTS, await asyncio.gather(*streams), strict=True):
                assert stream.done
                assert stream.reasons() == ["stop"]
                assert stream.entries()[-1]["finish_reason"] == "stop"
                assert stream.text() == "abcdefgh"[:seed]


async def test_the_end_at_the_last_allowed_token_is_an_end(tiny: Path) -> None:
    async with served(tiny, sampler=ScriptedSampler(SCRIPTS)) as service:
        for seed in SCRIPTS:
            body = {"prompt": "hi", "seed": seed, "max_tokens": seed + 1}
            assert (await service.stream(COMPLETIONS, body)).reasons() == ["stop"]
            [choice] = (await service.answer(COMPLETIONS, body))["choices"]
            assert choice["finish_reason"] == "stop"


async def test_the_end_can_be_ignored(tiny: Path) -> None:
    async with served(tiny, sampler=ScriptedSampler({0: [END_OF_TURN] * 3 + tokens_of("x")})) as service:
        answered = await service.answer(
            COMPLETIONS, {"prompt": "hi", "seed": 0, "max_tokens": 4, "ignore_eos": True}
        )
        assert answered["choices"][0]["text"].endswith("x")
        assert answered["choices"][0]["finish_reason"] == "length"
