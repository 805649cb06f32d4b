"""Case 53: a prompt that is sent again at once, or while the first is still running, is not computed twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, Served, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

HYBRIDS = ["qwen3_next", "mamba2"]
PIECE = 16
NUM_PROMPT = PIECE * 12 + 3
BODY = {
    "prompt": [(7 * i + i // 9) % 250 for i in range(NUM_PROMPT)],
    "temperature": 0,
    "max_tokens": 30,
    "ignore_eos": True,
}


async def asked_twice(service: Served, num_ticks: int) -> list[dict[str, Any]]:
    """Both answers, which are the same; the second is asked for when so many ticks of the first are over."""
    service.gate.shut()
    first = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
    await service.gate.engine_held()
    if num_ticks:
        service.gate.let(num_ticks)
        await service.gate.engine_held()
    second = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
    await service.submitted(2)
    service.gate.open()
    answers = await asyncio.gather(first, second)
    assert answers[0]["choices"] == answers[1]["choices"]
    return answers


@pytest.mark.parametrize("num_ticks", [0, 1, 5, 12, 13, 20])
async def test_at_any_moment_of_the_first(tiny: Path, num_ticks: int) -> None:
    async with served(tiny, prefill_chunk_size=PIECE) as service:
        answers = await asked_twice(service, num_ticks)
        computed = sum(tick.prefill_tokens for tick in service.engine.ticks)
        assert computed == sum(answer["timings"]["prompt_n"] for answer in answers)
        assert computed <= NUM_PROMPT + PIECE


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("num_ticks", [0, 1, 5, 12, 13, 20])
async def test_of_what_is_kept_whole(tmp_path: Path, family: str, num_ticks: int) -> None:
    async with served(write_zoo(tmp_path, family), prefill_chunk_size=PIECE) as service:
        answers = await asked_twice(service, num_ticks)
        computed = sum(tick.prefill_tokens for tick in service.engine.ticks)
        assert [answer["timings"]["prompt_n"] for answer in answers] == [NUM_PROMPT, 0]
        assert computed == NUM_PROMPT


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_of_what_is_kept_whole(tmp_path: Path, family: str, path: str) -> None:
    """More of them than slots; those that come later go on from the same place."""
    said = (
        {"messages": [{"role": "user", "content": "Say something."}]}
        if path == CHAT
        else {"prompt": BODY["prompt"]}
    )
    body = said | {"temperature": 1, "seed": 3, "max_tokens": 9, "ignore_eos": True, "n": 6}
    folder = write_zoo(tmp_path, family)
    async with served(folder, no_prompt_cache=True) as service:
        cold = await service.answer(path, body)
    async with served(folder, parallel=4) as service:
        answer = await service.answer(path, body)
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["choices"] == cold["choices"]
        assert (answer["timings"]["prompt_n"], answer["timings"]["cache_n"]) == (num_prompt, 5 * num_prompt)
        assert sum(tick.prefill_tokens for tick in service.engine.ticks) == num_prompt
        assert (await service.stream(path, body)).text(5) == text_of(answer["choices"][5])
        assert sum(tick.prefill_tokens for tick in service.engine.ticks) == num_prompt


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def test_right_after_the_first(tiny: Path) -> None:
    async with served(tiny) as service:
        for repeat in range(3):
            answer = await service.answer(COMPLETIONS, BODY)
            assert answer["timings"]["cache_n"] == (NUM_PROMPT // PIECE * PIECE if repeat else 0)
