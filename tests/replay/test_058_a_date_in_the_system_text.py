"""Case 58: a system text that ends otherwise is reused up to there, and log and answer say where that is."""

import logging
from pathlib import Path

import pytest

from tests.serving import CHAT, served

pytestmark = pytest.mark.anyio

RULES = "You are terse. You never apologize. "


def body(date: str) -> dict[str, object]:
    messages = [{"role": "system", "content": RULES + f"Today is {date}."}, {"role": "user", "content": "Hello"}]
    return {"messages": messages, "temperature": 0, "max_tokens": 2}


@pytest.mark.parametrize("other", ["2026-01-02", "2027-01-01", "x"])
async def test_up_to_the_change(tiny: Path, other: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tiny, portable=True) as service:
        first = await service.answer(CHAT, body("2026-01-01"))
        assert first["timings"]["cache_miss"] is None
        with caplog.at_level(logging.INFO, "engine.cache.prompts"):
            second = await service.answer(CHAT, body(other))
        one, two = (row.request.prompt for row in service.engine.rows)
        differs = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        assert second["timings"]["cache_n"] == differs // 16 * 16 > 0
        assert second["timings"]["cache_miss"] == {"token_index": differs, "message_index": 0}
        assert f"prompt token {differs} (id {two[differs]})" in caplog.text
