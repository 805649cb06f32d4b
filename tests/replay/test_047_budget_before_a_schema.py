"""Case 47: a thought's budget ends the thought and nothing else: what a schema holds begins behind it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.replies import HI, NO_BLANKS, answered, script
from tests.serving import CHAT, Served, served, tokens_of
from tests.templates import THINKING, THINKS_ITSELF, checkpoint
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.anyio

BUDGET = 16
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "word"],
    "properties": {"ok": {"type": "boolean"}, "word": {"type": "string", "maxLength": 6}},
}
HELD = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}}}
END = "\n</think>"
# The model opens its thought by a token of its own, which is made likely; one that the prompt has opened has none.
MARKS = ("<think>", "</think>")
OPENS = {"logit_bias": NO_BLANKS | {str(VOCAB_SIZE): 30}}
Opened = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=["by the prompt", "by the model"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A checkpoint whose thoughts are opened so, and what a request needs for that."""
    folder = tmp_path_factory.mktemp("models")
    if request.param == "by the prompt":
        return checkpoint(folder, THINKING), {"logit_bias": NO_BLANKS}
    return checkpoint(folder, THINKS_ITSELF, MARKS), OPENS


async def tokens_reasoned(service: Served, body: dict[str, Any]) -> int:
    whole = await service.answer(CHAT, body)
    tokens: int = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens


@pytest.mark.parametrize("budget", [0, 1, BUDGET])
async def test_the_schema_holds_behind_the_thought(opened: Opened, budget: int) -> None:
    folder, more = opened
    async with served(folder) as service:
        for seed in range(3):
            body = HI | more | {"seed": seed, "temperature": 1, "max_tokens": 200, "thinking_budget": budget}
            free = await answered(service, body | {"max_tokens": 50})
            choice = await answered(service, body | HELD)
            message = choice["message"]
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
            assert message.get("reasoning_content") == free["message"].get("reasoning_content")
            assert not free["message"]["content"].startswith("{")
            ended = max(budget, 1) + 2 if more == OPENS else budget + len(tokens_of(END))
            assert await tokens_reasoned(service, body | HELD) == ended


async def test_a_thought_that_ends_by_itself(tmp_path: Path) -> None:
    text = 'Short.\n</think>{"ok": true, "word": "yes"}'
    async with served(checkpoint(tmp_path, THINKING), sampler=script(text)) as service:
        choice = await answered(service, HI | HELD | {"thinking_budget": BUDGET})
    assert choice["message"]["reasoning_content"] == "Short."
    assert json.loads(choice["message"]["content"]) == {"ok": True, "word": "yes"}


async def test_in_a_batch_and_without_a_thought(opened: Opened) -> None:
    folder, more = opened
    bodies = [
        HI | more | HELD | {"seed": seed, "temperature": 1, "max_tokens": 200, "thinking_budget": budget}
        for seed, budget in enumerate((0, 3, BUDGET, 40))
    ]
    async with served(folder, parallel=4) as service:
        alone = [(await service.answer(CHAT, body))["choices"] for body in bodies]
        together = await asyncio.gather(*(service.answer(CHAT, body) for body in bodies))
    assert [answer["choices"] for answer in together] == alone


async def test_a_bound_within_the_thought_is_a_length(opened: Opened) -> None:
    folder, more = opened
    async with served(folder) as service:
        choice = await answered(
            service, HI | more | HELD | {"seed": 1, "temperature": 1, "max_tokens": 9, "thinking_budget": BUDGET}
        )
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
