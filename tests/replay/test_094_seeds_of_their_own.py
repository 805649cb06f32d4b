"""Case 94: requests without a seed draw differently although they start together; equal seeds draw as alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
HOT = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("path", BODIES)
async def test_together_and_alone(tiny: Path, path: str) -> None:
    body = BODIES[path] | HOT
    async with served(tiny, parallel=4) as service:

        async def together(*bodies: dict[str, Any]) -> list[tuple[int, ...]]:
            service.engine.rows.clear()
            await asyncio.gather(*(service.answer(path, body) for body in bodies))
            return [tuple(row.output) for row in service.engine.rows]

        assert len(set(await together(*[body] * 4))) == 4
        assert len(set(await together(body | {"n": 4}))) == 4
        [alone] = await together(body | {"seed": 3})
        assert await together(*[body | {"seed": 3}] * 4) == [alone] * 4
        choices = await together(body | {"seed": 3, "n": 3})
        assert choices[0] == alone
        assert len(set(choices)) == 3
        assert sorted(await together(body | {"seed": 3, "n": 3}, body)) != sorted(choices)
        assert set(choices) < set(await together(body | {"seed": 3, "n": 3}, body))
