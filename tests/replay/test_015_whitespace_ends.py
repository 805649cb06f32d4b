"""Case 15: a model that likes nothing better than whitespace still finishes its JSON."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serving import CHAT, served, tokens_of

pytestmark = pytest.mark.anyio

NAMES = ("title", "tags", "count", "parts", "open", "note")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": list(NAMES),
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
        "open": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 8},
    },
}
ASKED = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Fass «Der Fuchs» zusammen: «er war müde», «er ging»."}]


@pytest.mark.parametrize("liked", ["\n ", "\n", " ", "\t\n\r "])
async def test_logits_that_prefer_whitespace(tiny: Path, liked: str) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 3000,
        "response_format": ASKED,
        "logit_bias": {str(token): 100 for token in tokens_of(liked)},
    }
    async with served(tiny) as service:
        [choice] = (await service.answer(CHAT, body))["choices"]
        assert choice["finish_reason"] == "stop"
        said = json.loads(choice["message"]["content"])
        assert tuple(said) == NAMES
        jsonschema.validate(said, SCHEMA)
