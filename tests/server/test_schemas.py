"""Two hundred random schemas: each is refused by name, or every answer that ends by itself is valid."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.schemas import random_schema
from tests.serving import CHAT, COMPLETIONS, Served, served, tokens_of

pytestmark = pytest.mark.anyio

NUM_SCHEMAS, AT_ONCE = 200, 8


async def outcome(service: Served, path: str, body: dict[str, Any], number: int) -> str:
    """How the answer to the schema of this number ended, once it was held against the schema."""
    schema = random_schema(number)
    asked = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
    answer = await service.post(path, body | {"seed": number, "response_format": asked})
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] == "response_format.json_schema.schema", (schema, error)
        return "refused"
    assert answer.status_code == 200, (schema, answer.text)
    [choice] = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as fault:
            raise AssertionError(f"schema {number}, {schema}: {text!r}") from fault
    return str(choice["finish_reason"])


async def outcomes(service: Served, path: str, body: dict[str, Any], numbers: range) -> list[str]:
    found: list[str] = []
    for start in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(start, min(start + AT_ONCE, numbers.stop))
        found += await asyncio.gather(*(outcome(service, path, body, number) for number in some))
    return found


async def test_random_weights_keep_to_every_schema(tiny: Path) -> None:
    body = {
        "prompt": "x",
        "temperature": 1.0,
        "max_tokens": 120,
        "logit_bias": {str(token): 5.0 for token in tokens_of('"]},')},
    }
    async with served(tiny, parallel=AT_ONCE) as service:
        found = await outcomes(service, COMPLETIONS, body, range(NUM_SCHEMAS))
    assert found.count("stop") > NUM_SCHEMAS / 2
    assert NUM_SCHEMAS / 20 < found.count("refused") < NUM_SCHEMAS / 3


@pytest.mark.real
async def test_the_real_model_keeps_to_them(real_checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "Answer with a short JSON value of any kind."}]
    body = {"messages": messages, "temperature": 0.8, "max_tokens": 60}
    async with served(real_checkpoint, parallel=AT_ONCE, decode_storage_backend="paged") as service:
        found = await outcomes(service, CHAT, body, range(0, 24))
    assert found.count("stop") > 8
