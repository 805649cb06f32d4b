"""The next turn, warmed up: its beginning is stored while nothing runs, and no request notices."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.sample.state import Draw
from tests.replies import CALL, HI, TOOLS, script
from tests.serving import CHAT, Gate, served, tokens_of
from tests.templates import FORGETS, PLAIN, THINKING, checkpoint
from tests.tiny import END_OF_TURN, write_tokenizer
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

ANSWER = "I plan.\n</think>\n\nThis is an answer of some length."
OPENS_ALWAYS = PLAIN.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n\n</think>\n\n{%")
TEMPLATES = {"keeps": THINKING, "forgets": FORGETS, "opens": OPENS_ALWAYS}


def turns(whole: dict[str, Any], text: str = "And a second question, if I may?") -> dict[str, Any]:
    said = {"role": "assistant", "content": whole["choices"][0]["message"]["content"]}
    return HI | {"messages": [*HI["messages"], said, {"role": "user", "content": text}]}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "qwen3_next"])
async def test_all_before_the_users_next_words_is_there(tmp_path: Path, family: str, kind: str) -> None:
    if family == "gemma3_text":
        folder = checkpoint(tmp_path, TEMPLATES[kind])
    else:
        folder = write_zoo(tmp_path, family)
        write_tokenizer(folder, TEMPLATES[kind])
    async with served(folder, sampler=script(ANSWER), no_warmup_next_turn=False) as service:
        whole = await service.answer(CHAT, HI)
        await service.warmed_up()
        before = service.loop.numbers()
        second = await service.answer(CHAT, turns(whole))
        prompt = service.engine.language.tokens.decode(service.engine.rows[-1].request.prompt)
        await service.warmed_up()
    behind = "<|im_end|>\n<|im_start|>user\nAnd" if family == "gemma3_text" else "<|im_start|>user\nAnd"
    reusable = len(tokens_of(prompt[: prompt.index(behind)]))
    assert second["timings"]["cache_n"] >= (reusable // 16 * 16 if family == "gemma3_text" else reusable)
    assert sum(before.requests.values()) == 1
    assert before.prompt_tokens == whole["usage"]["prompt_tokens"]
    assert (before.prompt_cache.hits, before.prompt_cache.misses, before.prompt_cache.tokens_reused) == (0, 1, 0)


async def test_the_answer_is_what_it_is_without(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, THINKING)
    answers = []
    for off in (True, False):
        async with served(folder, no_warmup_next_turn=off) as service:
            body = HI | {"temperature": 0, "max_tokens": 20}
            whole = await service.answer(CHAT, body)
            await service.warmed_up()
            answers.append(
                await service.answer(CHAT, turns(whole) | body | {"messages": turns(whole)["messages"]})
            )
    assert answers[0]["choices"] == answers[1]["choices"]


async def test_who_asks_for_none_has_none(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"no_warmup_next_turn": True}, {}, "Hello"),
        ({"no_prompt_cache": True}, {}, "Hello"),
        ({}, {"cache_prompt": False}, "Hello"),
        ({}, TOOLS, CALL),
        ({}, {}, ""),
    ]
    folder = checkpoint(tmp_path, PLAIN)
    for config, fields, text in cases:
        async with served(folder, sampler=script(text), **({"no_warmup_next_turn": False} | config)) as service:
            await service.answer(CHAT, HI | fields)
            await service.warmed_up()
            assert len(service.engine.rows) == 1, (config, fields, text)


async def test_a_request_that_comes_ends_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "{{ messages | length }}" + PLAIN)  # so that nothing is there for the next turn
    scripted, gate = script("Hello"), Gate()

    def sampler(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
        tokens = scripted(logits, draws)
        if END_OF_TURN in tokens.tolist():  # type: ignore[operator]
            gate.shut()
        return tokens

    long = HI | {"messages": [{"role": "user", "content": "a long question " * 10}]}
    async with served(
        folder, sampler=sampler, gate=gate, no_warmup_next_turn=False, prefill_chunk_size=16
    ) as service:
        await service.answer(CHAT, long)
        await gate.engine_held()
        [_, warm_up] = service.engine.rows
        other = asyncio.ensure_future(service.answer(CHAT, HI | {"max_tokens": 1}))
        await service.submitted(1)
        gate.open()
        await other
        assert warm_up.finish_reason == "cancelled"
        assert warm_up.storage is None
        assert sum(warm_up in tick.rows for tick in service.engine.ticks) == 1
        again = await service.answer(CHAT, HI | {"messages": [*long["messages"]] * 3, "max_tokens": 1})
        assert again["timings"]["cache_n"] >= 16
        await service.warmed_up()
