"""Case 21: the context that is advertised is the one that is enforced, however it is shared."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.engines import Watched
from tests.serving import COMPLETIONS, Served, served
from tests.zoo import write_zoo

pytestmark = pytest.mark.anyio

CASES = [
    ({}, 4096),
    ({"ctx_size": 100}, 100),
    ({"parallel": 1, "ctx_size": 100}, 100),
    ({"parallel": 4, "ctx_size": 100}, 25),
    ({"parallel": 4}, 1024),
    ({"parallel": 4, "kv_unified": True, "ctx_size": 100}, 100),
    ({"kv_unified": False, "ctx_size": 100}, 25),
    ({"no_batch": True, "kv_unified": False, "ctx_size": 100}, 100),
]


async def assert_everywhere(service: Served, context: int) -> None:
    props = (await service.client.get("/props")).json()
    slots = (await service.client.get("/slots")).json()
    [model] = (await service.client.get("/v1/models")).json()["data"]
    assert props["default_generation_settings"]["n_ctx"] == context
    assert [slot["n_ctx"] for slot in slots] == [context] * props["total_slots"]
    assert model["max_model_len"] == model["meta"]["n_ctx"] == context
    assert any(note.startswith(f"context: {context} tokens") for note in service.engine.notes)
    if context < 1000:
        answered = await service.answer(COMPLETIONS, {"prompt": [1] * (context - 1), "ignore_eos": True})
        assert answered["usage"]["total_tokens"] == context
        refused = await service.post(COMPLETIONS, {"prompt": [1] * context})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("settings", "context"), CASES)
async def test_what_is_said_is_what_holds(tiny: Path, settings: dict[str, object], context: int) -> None:
    async with served(tiny, **settings) as service:
        await assert_everywhere(service, context)


async def test_a_family_that_runs_one_at_a_time_has_all_of_it(tmp_path: Path) -> None:
    async with served(write_zoo(tmp_path, "llama4"), ctx_size=64) as service:
        assert service.engine.num_slots == 1
        await assert_everywhere(service, 64)


async def test_rows_in_one_context_never_exceed_it_together(tiny: Path) -> None:
    async with served(tiny, ctx_size=100) as service:
        body = {"prompt": [*range(30)], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(*(service.answer(COMPLETIONS, body | {"seed": i}) for i in range(4)))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [40] * 4
        assert service.loop.numbers().preemptions > 0
        text = (await service.client.get("/metrics")).text
        assert f"mlxcel_preemptions_total {float(service.loop.numbers().preemptions)}" in text


def test_a_context_that_cannot_be_split_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="a context of 3 tokens cannot be split over 4 requests"):
        Watched(tiny, ctx_size=3, parallel=4)
