"""Case 14: a response format is enforced or refused, on every lane, and never dropped in silence."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serving import CHAT, COMPLETIONS, Served, served

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "reason"],
    "properties": {"ok": {"type": "boolean"}, "reason": {"type": "string", "maxLength": 12}},
}
ENFORCED = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}}
REFUSED = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA | {"not": {}}}}
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}
LANES = [(no_batch, streamed) for no_batch in (True, False) for streamed in (True, False)]


async def text(service: Served, path: str, body: dict[str, Any], streamed: bool) -> tuple[str, str]:
    if streamed:
        stream = await service.stream(path, body)
        [reason] = stream.reasons()
        return stream.text(), reason
    [choice] = (await service.answer(path, body))["choices"]
    return choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(("no_batch", "streamed"), LANES)
async def test_it_is_enforced_or_refused(tiny: Path, path: str, no_batch: bool, streamed: bool) -> None:
    async with served(tiny, no_batch=no_batch) as service:
        bodies = [
            PROMPTS[path] | {"max_tokens": 300, "response_format": ENFORCED, "seed": seed} for seed in range(3)
        ]
        for said, reason in await asyncio.gather(*(text(service, path, body, streamed) for body in bodies)):
            assert reason == "stop"
            jsonschema.validate(json.loads(said), SCHEMA)
        refused = await service.post(path, bodies[0] | {"response_format": REFUSED, "stream": streamed})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
