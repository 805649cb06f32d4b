"""Case 3: a field that is null is a field that was not given, for every field of both dialects."""

from pathlib import Path

import msgspec
import pytest

from server.validate import MEANINGLESS, NEUTRAL, ChatBody, CompletionBody
from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio

PLAIN = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 3, "temperature": 0},
}
BODIES = {CHAT: ChatBody, COMPLETIONS: CompletionBody}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_equals_absent_for_every_field(tiny: Path, path: str) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(BODIES[path])} | set(NEUTRAL) | MEANINGLESS
    optional = names - set(PLAIN[path])
    async with served(tiny) as service:
        plain = await service.answer(path, PLAIN[path])
        for nulls in (
            {"max_tokens"},
            {"model"},
            {"max_tokens", "model"},
            *({name} for name in optional),
            optional,
        ):
            given = {name: value for name, value in PLAIN[path].items() if name not in nulls}
            if "max_tokens" in nulls:
                given["stop"] = [chr(letter) for letter in range(ord("a"), ord("q"))]  # ends within the context
            answered = await service.answer(path, given | dict.fromkeys(nulls))
            if "max_tokens" not in nulls:
                assert answered["choices"] == plain["choices"]
