"""Case 60: tokens that are said to be cached were not computed: the counter of computed ones is the rest."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import CHAT, Served, served
from tests.tiny import write_checkpoint
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

SYSTEM = {"role": "system", "content": "You are terse, and you never apologize for anything that you say."}


async def computed(service: Served) -> float:
    """What `/metrics` says, which must be what the engine was asked to run."""
    text = (await service.client.get("/metrics")).text
    samples = {sample.name: sample.value for f in text_string_to_metric_families(text) for sample in f.samples}
    assert samples["mlxcel_prompt_tokens_total"] == sum(tick.prefill_tokens for tick in service.engine.ticks)
    return samples["mlxcel_prompt_tokens_total"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
async def test_prompt_less_cached_is_computed(tmp_path: Path, family: str) -> None:
    folder = write_zoo(tmp_path, family) if family == "qwen3_next" else write_checkpoint(tmp_path, family)
    async with served(folder) as service:
        messages, before, hits = [SYSTEM], 0.0, 0
        for turn in range(4):
            messages.append(
                {"role": "user", "content": f"Question {turn}, of many words that all have to be read."}
            )
            for _ in range(2):
                body = {"messages": list(messages), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
                answer = await service.answer(CHAT, body)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                after = await computed(service)
                assert after - before == answer["usage"]["prompt_tokens"] - cached == answer["timings"]["prompt_n"]
                before, hits = after, hits + (cached > 0)
            messages.append(answer["choices"][0]["message"])
        assert hits == 7
