"""Case 75: a client that leaves during a long prefill, or while its row decodes, frees it within one step."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, Served, served, settle

pytestmark = pytest.mark.anyio

PIECE = 16
NUM_PIECES = 12
BODY = {"prompt": [7] * (PIECE * NUM_PIECES), "temperature": 0, "max_tokens": 50, "ignore_eos": True}


async def leave_after(service: Served, num_ticks: int, *, streamed: bool) -> None:
    """Post BODY, let some ticks pass, and leave while the next one is held."""
    service.gate.shut()
    client = asyncio.ensure_future(service.post(COMPLETIONS, BODY | {"stream": streamed}))
    await service.gate.engine_held()
    service.gate.let(num_ticks)
    await service.gate.engine_held()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    await service.exchanges_ended()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_ticks", [0, 1, 5, NUM_PIECES - 1, NUM_PIECES, NUM_PIECES + 5])
async def test_the_row_is_freed_within_one_step(
    tiny: Path, num_ticks: int, lookahead: bool, streamed: bool
) -> None:
    async with served(tiny, prefill_chunk_size=PIECE, lookahead=lookahead) as service:
        await leave_after(service, num_ticks, streamed=streamed)
        service.gate.open()
        await asyncio.to_thread(settle, service.loop)
        assert len(service.engine.ticks) == num_ticks + 1
        assert service.engine.rows[0].finish_reason == "cancelled"
        assert service.engine.rows[0].storage is None


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("streamed", [True, False])
async def test_the_neighbour_does_not_notice(tiny: Path, lookahead: bool, streamed: bool) -> None:
    other = {"prompt": "somebody else", "temperature": 0, "max_tokens": 30}
    async with served(tiny, prefill_chunk_size=PIECE, lookahead=lookahead) as service:
        alone = await service.answer(COMPLETIONS, other)
        await leave_after(service, 3, streamed=streamed)
        neighbour = asyncio.ensure_future(service.answer(COMPLETIONS, other))
        service.gate.open()
        assert (await neighbour)["choices"] == alone["choices"]
