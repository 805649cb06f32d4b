"""Case 81: a server whose steps hang is alive and not ready: what counts is tokens and pieces, not turns."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, Served, served, settle

pytestmark = pytest.mark.anyio

BODY = {"prompt": [7] * 12, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Clock:
    """A clock that stands until it is set on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def ready(service: Served) -> int:
    """The status of `/health/ready`; `/health` is 200 all the while."""
    assert (await service.client.get("/health")).status_code == 200
    response = await service.client.get("/health/ready")
    if response.status_code != 200:
        assert response.json()["error"]["code"] == "engine_stalled"
        assert response.headers["retry-after"]
    return response.status_code


@pytest.mark.parametrize("num_ticks", [0, 1, 3, 5], ids=["at once", "in a prompt", "at a token", "later"])
async def test_a_step_that_hangs_is_seen(tiny: Path, num_ticks: int) -> None:
    clock = Clock()
    async with served(tiny, clock=clock, stall_timeout=60, prefill_chunk_size=4, lookahead=False) as service:
        clock.now_s += 500
        assert await ready(service) == 200
        service.gate.shut()
        asked = [asyncio.ensure_future(service.answer(COMPLETIONS, BODY)) for _ in range(2)]
        await service.submitted(2)
        for _ in range(num_ticks):
            await service.gate.engine_held()
            clock.now_s += 59
            assert await ready(service) == 200
            service.gate.let(1)
        await service.gate.engine_held()
        clock.now_s += 60
        assert await ready(service) == 200
        late = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
        await service.submitted(3)
        clock.now_s += 1
        assert await ready(service) == 503
        service.gate.let(1)
        await service.gate.engine_held()
        assert await ready(service) == 200
        service.gate.open()
        await asyncio.gather(*asked, late)
        await asyncio.to_thread(settle, service.loop)
        clock.now_s += 500
        assert await ready(service) == 200


async def test_zero_switches_it_off(tiny: Path) -> None:
    clock = Clock()
    async with served(tiny, clock=clock, stall_timeout=0) as service:
        service.gate.shut()
        asked = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
        await service.gate.engine_held()
        clock.now_s += 1e6
        assert await ready(service) == 200
        service.gate.open()
        await asked
