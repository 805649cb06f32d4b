"""Case 93: a long prompt stalls no stream and no newcomer, and they do not stall it."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.plan import Tick
from engine.request import Row
from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio

PIECE, INTERVAL = 32, 4
NUM_LONG, NUM_SHORT, NUM_STREAM = 3200, 9, 3
BEFORE_LONG, BEFORE_SHORT = 12, 20  # ticks


def body(num_prompt: int, num_new: int, seed: int = 0) -> dict[str, Any]:
    prompt = [(7 * i + 31 * seed + num_prompt) % 250 for i in range(num_prompt)]
    return {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("mixed_step", [0, PIECE + 3])
async def test_two_streams_a_long_prompt_and_a_short_request(tiny: Path, mixed_step: int) -> None:
    settings = {"prefill_chunk_size": PIECE, "prefill_grant_interval": INTERVAL, "mixed_step": mixed_step}
    async with served(tiny, parallel=4, kv_unified=True, **settings) as service:
        engine, gate = service.engine, service.gate
        gate.shut()
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        for num_ticks, *bodies in (
            (BEFORE_LONG, body(NUM_STREAM, 700, 1), body(NUM_STREAM, 700, 2)),
            (BEFORE_SHORT, body(NUM_LONG, 5)),
            (float("inf"), body(NUM_SHORT, 5)),
        ):
            tasks += [asyncio.ensure_future(service.answer(COMPLETIONS, one)) for one in bodies]
            await service.submitted(len(tasks))
            gate.let(num_ticks)
            if len(tasks) < 4:
                await gate.engine_held()
        await asyncio.gather(*tasks)
        rows = {len(row.request.prompt): row for row in engine.rows}
        streams = [row for row in engine.rows if len(row.request.prompt) == NUM_STREAM]
        assert_fair(engine.ticks, rows[NUM_LONG], rows[NUM_SHORT], streams, mixes=bool(mixed_step))


def assert_fair(ticks: list[Tick], long: Row, short: Row, streams: list[Row], *, mixes: bool) -> None:
    pieces = [i for i, tick in enumerate(ticks) if any(piece.row is long for piece in tick.prefill)]
    num_pieces = -(-NUM_LONG // PIECE)
    assert len(pieces) == num_pieces
    assert all(tick.prefill_tokens <= PIECE for tick in ticks)
    period = 1 if mixes else INTERVAL + 1
    assert pieces[-1] - BEFORE_LONG <= num_pieces * period + mixes
    while_long = range(pieces[0], pieces[-1] + 1)
    for stream in streams:
        steps = [i for i in while_long if stream in ticks[i].decode]
        assert max(b - a for a, b in itertools.pairwise(steps)) <= (1 if mixes else 2)
        assert len(steps) >= len(while_long) * (1 if mixes else INTERVAL / period) - 3
    first, *_, last = (i for i, tick in enumerate(ticks) if short in tick.rows)
    assert first - (BEFORE_LONG + BEFORE_SHORT) <= 4
    assert last < pieces[-1]
