"""Case 91: a request that joins a running one, at any step, gets what it gets alone, and so does the other."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, WatchedEngine, served
from tests.tiny import CONFIGS, write_checkpoint

pytestmark = pytest.mark.anyio

LONG = {"prompt": [(31 * i + 5) % 250 for i in range(40)], "seed": 1}
SHORT = {"prompt": [(17 * i + 3) % 250 for i in range(9)], "seed": 2}
SETTINGS = {"max_tokens": 60, "ignore_eos": True, "temperature": 1}


def output_of(engine: WatchedEngine, seed: int) -> list[int]:
    return next(row.output for row in reversed(engine.rows) if row.request.sampling.seed == seed)


@pytest.fixture(params=CONFIGS, scope="session")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("families") / request.param, request.param)


async def test_joining_changes_nothing(family: Path) -> None:
    async with served(family, parallel=2, prefill_chunk_size=16, prefill_grant_interval=1) as service:
        for body in (LONG, SHORT):
            await service.answer(COMPLETIONS, body | SETTINGS)
        alone = {seed: output_of(service.engine, seed) for seed in (1, 2)}
        for first, second in ((LONG, SHORT), (SHORT, LONG)):
            for step in (1, 5, 50):
                service.gate.shut()
                running = asyncio.ensure_future(service.answer(COMPLETIONS, first | SETTINGS))
                await service.gate.engine_held()
                service.gate.let(-(-len(first["prompt"]) // 16) + step - 1)
                await service.gate.engine_held()
                joining = asyncio.ensure_future(service.answer(COMPLETIONS, second | SETTINGS))
                await service.submitted(2)
                service.gate.open()
                await asyncio.gather(running, joining)
                assert any(len(tick.decode) == 2 for tick in service.engine.ticks)
                service.engine.ticks.clear()
                assert {seed: output_of(service.engine, seed) for seed in (1, 2)} == alone, step
