"""Case 68: where attention keeps its scores, pieces get shorter as the prompt goes on, and nobody is aborted."""

from pathlib import Path

import pytest

from engine.size import Bound
from tests.serving import COMPLETIONS, served
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

FREE = 32 << 20
PROMPT = [(7 * i + i // 9) % 250 for i in range(3000)]
BODY = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, head_dim=160, num_key_value_heads=1)


async def test_a_long_prompt_is_stored_in_shorter_and_shorter_pieces(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.room.available_bytes", lambda: FREE)
    async with served(
        wide, portable=True, prefill_chunk_size=1000, no_prompt_cache=True, kv_cache_budget=Bound("64MB")
    ) as service:
        answered = await service.answer(COMPLETIONS, BODY)
        engine = service.engine
        pieces = [piece for tick in engine.ticks for piece in tick.prefill]
        sizes = [piece.num_tokens for piece in pieces]
        assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
        assert 1000 > sizes[0] > sizes[-2] >= 16
        assert all(
            engine.room.transient.bytes_of(piece.start, piece.num_tokens) <= engine.room.piece_bytes <= FREE // 4
            for piece in pieces
        )
    async with served(wide, portable=True, no_prompt_cache=True) as service:
        assert (await service.answer(COMPLETIONS, BODY))["choices"] == answered["choices"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_can_never_be_stored_is_refused_before_the_stream(wide: Path, streamed: bool) -> None:
    async with served(wide, portable=True, kv_cache_budget=Bound("5MB")) as service:
        response = await service.post(COMPLETIONS, BODY | {"stream": streamed})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            "invalid_request_error",
            "memory_exceeded",
            "prompt",
        )
        assert error["message"].startswith("a prompt of 3000 tokens and 2 new ones take ")
        assert "may take 5.0 MB" in error["message"]
        assert service.engine.ticks == []
        await service.answer(COMPLETIONS, BODY | {"prompt": PROMPT[:100]})
