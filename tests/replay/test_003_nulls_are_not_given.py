"""Case 3: a field that is null is a field that was not given, for every field of all dialects."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.bodies import CompletionBody
from server.chat import ChatBody
from server.items import ResponsesBody
from server.messages import MessagesBody
from server.validate import MEANINGLESS, neutral_of
from tests.serving import CHAT, COMPLETIONS, MESSAGES, RESPONSES, served

pytestmark = pytest.mark.anyio

PLAIN = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 3, "temperature": 0},
}
BODIES = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
ANSWERS: dict[str, tuple[type[msgspec.Struct], dict[str, Any], str]] = {
    MESSAGES: (MessagesBody, PLAIN[CHAT], "content"),
    RESPONSES: (ResponsesBody, {"input": "hi", "max_output_tokens": 3, "temperature": 0}, "output"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_equals_absent_for_every_field(tiny: Path, path: str) -> None:
    names = (
        {field.encode_name for field in msgspec.structs.fields(BODIES[path])}
        | set(neutral_of(BODIES[path]))
        | MEANINGLESS
    )
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


@pytest.mark.parametrize("path", list(ANSWERS))
async def test_null_equals_absent_for_every_field_of_newer_dialects(tiny: Path, path: str) -> None:
    kind, plain, field = ANSWERS[path]
    names = {field.encode_name for field in msgspec.structs.fields(kind)} | set(neutral_of(kind)) | MEANINGLESS
    optional = names - set(plain)

    def said(answer: dict[str, Any]) -> list[Any]:
        return [entry | {"id": ""} for entry in answer[field]]

    async with served(tiny) as service:
        expected = said(await service.answer(path, plain))
        for nulls in (*({name} for name in optional), optional):
            assert said(await service.answer(path, plain | dict.fromkeys(nulls))) == expected
