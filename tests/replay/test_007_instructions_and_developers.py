"""Case 7: instructions and developer items reach templates that know neither, and nothing fails behind headers."""

from pathlib import Path

import pytest

from tests.serving import RESPONSES, served
from tests.templates import FIRST_SYSTEM, checkpoint

pytestmark = pytest.mark.anyio


async def test_they_are_one_system_turn(tmp_path: Path) -> None:
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "hi"}]
    body = {"instructions": "a", "input": items, "max_output_tokens": 2}
    async with served(checkpoint(tmp_path, FIRST_SYSTEM)) as service:
        stream = await service.stream(RESPONSES, body)
        prompt = service.engine.language.tokens.decode(service.engine.rows[0].request.prompt)
    assert stream.chunks[-1]["type"] == "response.incomplete"
    assert "system\na\n\nb<" in prompt
