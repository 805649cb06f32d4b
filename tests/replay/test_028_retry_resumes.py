"""Case 28: a client that gives up during the prefill and asks again goes on where it stopped, every time."""

import asyncio
from pathlib import Path

import pytest

from tests.serving import COMPLETIONS, served

pytestmark = pytest.mark.anyio

PIECE = 16
BODY = {"prompt": [(7 * i + i // 9) % 250 for i in range(PIECE * 12 + 5)], "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("num_pieces", [1, 2, 3])
async def test_every_attempt_starts_where_the_last_one_stopped(
    tiny: Path, num_pieces: int, streamed: bool
) -> None:
    async with served(tiny, prefill_chunk_size=PIECE, no_prompt_cache=True) as service:
        expected = await service.answer(COMPLETIONS, BODY)
    async with served(tiny, prefill_chunk_size=PIECE) as service:
        for attempt in range(3):
            service.gate.shut()
            client = asyncio.ensure_future(service.post(COMPLETIONS, BODY | {"stream": streamed}))
            await service.gate.engine_held()
            service.gate.let(num_pieces)
            await service.gate.engine_held()
            client.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client
            await service.exchanges_ended()
            service.gate.open()
            starts = [piece.start for tick in service.engine.ticks for piece in tick.prefill]
            assert starts == list(range(0, len(starts) * PIECE, PIECE))
            assert len(starts) >= (attempt + 1) * num_pieces
        answer = await service.answer(COMPLETIONS, BODY)
        assert answer["choices"] == expected["choices"]
        computed = sum(piece.num_tokens for tick in service.engine.ticks for piece in tick.prefill)
        assert computed == len(BODY["prompt"])  # type: ignore[arg-type]
