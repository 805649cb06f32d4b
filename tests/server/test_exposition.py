"""`GET /metrics`: every number under its name, of one application and of no other."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import OUTCOMES, Numbers
from server.exposition import METRICS, Exposition
from tests.serving import COMPLETIONS, Served, served, settle

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


async def scraped(service: Served) -> dict[str, float]:
    """Every sample of a scrape, by its name and label."""
    response = await service.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for value in sample.labels.values())
            assert sample.name + labels not in samples
            samples[sample.name + labels] = sample.value
    return samples


def test_every_name_of_the_table_is_written_as_it_stands_there() -> None:
    text = Exposition(lambda: {"": Numbers()}).write().decode()
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind}\n" in text
        assert (metric.kind == "counter") == metric.name.endswith("_total")


async def test_requests_are_counted(tiny: Path) -> None:
    async with served(tiny, prefill_chunk_size=2, max_queue_depth=0, parallel=2) as service:
        await asyncio.gather(service.answer(COMPLETIONS, BODY), service.stream(COMPLETIONS, BODY))
        await asyncio.to_thread(settle, service.loop)
        samples = await scraped(service)
        assert {name: samples[f"mlxcel_requests_total{{{name}}}"] for name in OUTCOMES} == {
            "stop": 0, "length": 2, "cancelled": 0, "failed": 0, "refused": 0, "handed_over": 0,
        }  # fmt: skip
        assert samples["mlxcel_prompt_tokens_total"] == samples["llamacpp:prompt_tokens_total"] == 6
        assert samples["mlxcel_completion_tokens_total"] == samples["llamacpp:tokens_predicted_total"] == 8
        assert samples["mlxcel_prefill_pieces_total"] == 4
        assert samples["mlxcel_ttft_seconds_count"] == samples["mlxcel_ttft_seconds_bucket{+Inf}"] == 2
        assert samples["mlxcel_inter_token_seconds_count"] == 6
        assert samples["mlxcel_e2e_seconds_count"] == 2
        assert samples["mlxcel_prompt_tokens_cached_total"] == samples["mlxcel_preemptions_total"] == 0
        ticks = service.engine.ticks
        assert samples["mlxcel_decode_steps_total"] == sum(bool(tick.decode) for tick in ticks)
        assert samples["mlxcel_prefill_grants_total"] == sum(bool(tick.prefill) for tick in ticks)
        assert samples["llamacpp:n_decode_total"] == len(ticks)
        assert samples["llamacpp:n_tokens_max"] == 7


async def test_what_stands_now_is_shown_while_the_engine_is_busy(tiny: Path) -> None:
    async with served(tiny, parallel=1) as service:
        service.gate.shut()
        asked = [asyncio.ensure_future(service.answer(COMPLETIONS, BODY)) for _ in range(3)]
        await service.submitted(3)
        await service.gate.engine_held()
        service.gate.let(1)
        await service.gate.engine_held()
        samples = await scraped(service)
        assert samples["mlxcel_active_rows"] == samples["llamacpp:requests_processing"] == 1
        assert samples["mlxcel_queue_depth"] == samples["llamacpp:requests_deferred"] == 2
        assert samples["mlxcel_kv_bytes"] > 0
        service.gate.open()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("lookahead", [False, True])
async def test_steps_ahead_are_counted(tiny: Path, lookahead: bool) -> None:
    async with served(tiny, lookahead=lookahead) as service:
        await service.answer(COMPLETIONS, BODY)
        await asyncio.to_thread(settle, service.loop)
        assert ((await scraped(service))["mlxcel_lookahead_steps_total"] > 0) == lookahead


async def test_applications_do_not_share_their_numbers(tiny: Path) -> None:
    async with served(tiny) as first, served(tiny) as second:
        await first.answer(COMPLETIONS, BODY)
        await asyncio.to_thread(settle, first.loop)
        assert (await scraped(first))["mlxcel_requests_total{length}"] == 1
        assert (await scraped(second))["mlxcel_requests_total{length}"] == 0
