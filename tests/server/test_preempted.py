"""What a client sees of a preemption: a longer gap, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from engine.size import Bound
from tests.serving import COMPLETIONS, PATIENCE_S, served

pytestmark = pytest.mark.anyio

PREFIX = [(7 * i + i // 9) % 250 for i in range(40)]
CONTEXT = 100


def body(user: int) -> dict[str, object]:
    prompt = [*PREFIX, *[(user * 13 + i) % 250 for i in range(3 + user)]]
    usage = {"stream_options": {"include_usage": True}}
    return {"prompt": prompt, "seed": user, "temperature": 0.8, "max_tokens": 20, "ignore_eos": True, **usage}


@pytest.mark.parametrize("lookahead", [False, True])
async def test_streams_and_figures_are_those_of_one_that_was_left_alone(tiny: Path, lookahead: bool) -> None:
    async with served(tiny, no_prompt_cache=True) as service:
        alone = [await service.stream(COMPLETIONS, body(user)) for user in range(5)]
    async with served(tiny, no_prompt_cache=True, ctx_size=CONTEXT, lookahead=lookahead) as service:
        streams = await asyncio.gather(*(service.stream(COMPLETIONS, body(user)) for user in range(5)))
        await service.exchanges_ended()
        numbers = service.loop.numbers()
        preempted = [row for row in service.engine.rows if row.num_preempted]
        text = (await service.client.get("/metrics")).text
    assert preempted
    for stream, expected in zip(streams, alone, strict=True):
        assert stream.done
        assert stream.deltas() == expected.deltas()
        assert stream.reasons() == ["length"]
        assert stream.comments == expected.comments
        timings = stream.chunks[-1]["timings"]
        assert stream.chunks[-1]["usage"] == expected.chunks[-1]["usage"]
        assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (
            expected.chunks[-1]["timings"]["prompt_n"], 0, 20,
        )  # fmt: skip
    assert numbers.preemptions == sum(row.num_preempted for row in preempted)
    assert numbers.prompt_tokens + numbers.recomputed_tokens == sum(
        piece.num_tokens for tick in service.engine.ticks for piece in tick.prefill
    )
    assert numbers.recomputed_tokens > 0
    assert numbers.ttft_s.num_observed == numbers.queue_wait_s.num_observed == 5
    assert f"mlxcel_preemptions_total {float(numbers.preemptions)}\n" in text
    assert f"mlxcel_recomputed_tokens_total {float(numbers.recomputed_tokens)}\n" in text


async def test_one_that_waits_again_can_be_cancelled(tiny: Path) -> None:
    async with served(tiny, ctx_size=CONTEXT) as service:
        clients = [asyncio.ensure_future(service.stream(COMPLETIONS, body(user))) for user in range(2)]
        service.gate.shut()
        while not any(row.num_preempted for row in service.engine.rows):
            await service.gate.engine_held()
            service.gate.let(1)
        await service.gate.engine_held()
        [waiting] = [number for number, row in enumerate(service.engine.rows) if row.num_preempted]
        left = next(i for i, c in enumerate(clients) if len(body(i)["prompt"]) == len(
            service.engine.rows[waiting].request.prompt
        ))  # fmt: skip
        clients[left].cancel()
        service.gate.open()
        ended, _ = await asyncio.wait(clients, timeout=PATIENCE_S)
        assert len(ended) == 2
        assert clients[1 - left].result().reasons() == ["length"]
        await service.exchanges_ended()
        assert service.engine.rows[waiting].finish_reason == "cancelled"
        service.engine.memory.check()


async def test_props_say_what_may_be_stored(tiny: Path) -> None:
    async with served(tiny, kv_cache_budget=Bound("3MB")) as service:
        said = (await service.client.get("/props")).json()["storable"]
        assert said["budget_bytes"] == 3_000_000
        assert said["token_bytes"] > 0
        assert said["row_bytes"] > 4096 * said["token_bytes"]
