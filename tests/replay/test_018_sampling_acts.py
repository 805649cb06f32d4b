"""Case 18: temperature, top_p and their kind act on every lane: alone or batched, streamed or not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serving import COMPLETIONS, Served, served

pytestmark = pytest.mark.anyio

BODY = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True}
NARROW: list[dict[str, Any]] = [
    {"top_p": 0.0},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"min_p": 1.0},
    {"temperature": 1e-6},
    {"top_n_sigma": 1e-6},
    {"mirostat": 2, "mirostat_tau": 0},
    {"mirostat": 1, "mirostat_tau": 0},
    {"temperature": 1.0, "dynatemp_range": 1.0, "top_k": 1},
]
WIDE: list[dict[str, Any]] = [
    {"top_k": 100000},
    {"min_keep": 10**30, "top_k": 1, "xtc_probability": 1.0},
    {"min_keep": 100000, "top_p": 0.0, "min_p": 1.0},
    {"typical_p": 1.0, "top_p": 1.0, "min_p": 0.0},
    {"top_n_sigma": 100.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.5},
    {"dry_multiplier": 1.0, "dry_allowed_length": 10**30},
    {"dynatemp_range": 0.0, "dynatemp_exponent": 3.0},
]
LANES = [(no_batch, streamed) for no_batch in (True, False) for streamed in (True, False)]


async def outputs(service: Served, bodies: list[dict[str, Any]], streamed: bool) -> list[tuple[int, ...]]:
    """The tokens of each body's answer, the bodies sent at once."""
    before = len(service.engine.rows)
    ask = service.stream if streamed else service.answer
    await asyncio.gather(*(ask(COMPLETIONS, body) for body in bodies))
    return [tuple(row.output) for row in service.engine.rows[before:]]


@pytest.mark.parametrize(("no_batch", "streamed"), LANES)
async def test_every_field_acts(tiny: Path, no_batch: bool, streamed: bool) -> None:
    async with served(tiny, no_batch=no_batch) as service:
        [greedy] = await outputs(service, [BODY | {"temperature": 0}], streamed)
        hot = BODY | {"temperature": 1.0}
        assert len(set(await outputs(service, [hot] * 3, streamed))) == 3
        assert len(set(await outputs(service, [hot | {"seed": 7}] * 3, streamed))) == 1
        for narrow in NARROW:
            assert await outputs(service, [hot | {"temperature": 100.0} | narrow], streamed) == [greedy], narrow


@pytest.mark.parametrize(("no_batch", "streamed"), LANES)
async def test_what_allows_everything_changes_nothing(tiny: Path, no_batch: bool, streamed: bool) -> None:
    """Bounds beyond the vocabulary are no errors either."""
    async with served(tiny, no_batch=no_batch) as service:
        seeded = BODY | {"temperature": 1.0, "seed": 11}
        [plain] = await outputs(service, [seeded], streamed)
        for wide in WIDE:
            assert await outputs(service, [seeded | wide], streamed) == [plain], wide


async def test_a_seed_gives_the_same_tokens_on_every_lane(tiny: Path) -> None:
    seen = set()
    for no_batch, streamed in LANES:
        async with served(tiny, no_batch=no_batch) as service:
            bodies = [BODY | {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": seed} for seed in range(4)]
            seen.add(tuple(sorted(await outputs(service, bodies, streamed))))
    assert len(seen) == 1


async def test_what_is_not_said_is_as_the_server_was_told(tiny: Path) -> None:
    async with served(tiny, temp=1.0, seed=5) as service:
        first, second = await outputs(service, [BODY, BODY], streamed=False)
        [greedy] = await outputs(service, [BODY | {"temperature": 0}], streamed=False)
        [any_seed] = await outputs(service, [BODY | {"seed": -1}], streamed=False)
        assert first == second
        assert len({first, greedy, any_seed}) == 3
