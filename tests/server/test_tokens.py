"""llama-server's `/tokenize`, `/detokenize` and `/apply-template` agree with what generation does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving import CHAT, served, tokens_of
from tests.tiny import VOCAB_SIZE, write_checkpoint, write_tokenizer

pytestmark = pytest.mark.anyio

TEXT = "hé <|im_end|> 👋"


async def test_there_and_back(tiny: Path) -> None:
    async with served(tiny) as service:
        for text in (TEXT, "", "\n", "e\u0301"):
            tokens = (await service.answer("/tokenize", {"content": text}))["tokens"]
            assert tokens == tokens_of(text)
            assert await service.answer("/detokenize", {"tokens": tokens}) == {"content": text}


async def test_pieces_are_texts_or_bytes(tiny: Path) -> None:
    async with served(tiny) as service:
        told = (await service.answer("/tokenize", {"content": TEXT, "with_pieces": True}))["tokens"]
        assert [one["id"] for one in told] == tokens_of(TEXT)
        assert told[0]["piece"] == "h"
        assert told[1]["piece"] == [0xC3]
        assert "<|im_end|>" in [one["piece"] for one in told]
        spelled = b"".join(bytes(p) if isinstance(p := one["piece"], list) else p.encode() for one in told)
        assert spelled.decode() == TEXT


async def test_texts_and_ids_follow_each_other(tiny: Path) -> None:
    async with served(tiny) as service:
        mixed = {"content": ["a", 5, "b"], "add_special": True}
        assert (await service.answer("/tokenize", mixed))["tokens"] == [*tokens_of("a"), 5, *tokens_of("b")]


@pytest.mark.real
async def test_what_begins_a_sequence_is_added_where_it_is_asked_for(real_base_checkpoint: Path) -> None:
    async with served(real_base_checkpoint) as service:
        bos = service.engine.language.tokens.encode("", True)
        assert bos
        plain = (await service.answer("/tokenize", {"content": "hi"}))["tokens"]
        assert (await service.answer("/tokenize", {"content": "hi", "add_special": True}))["tokens"] == [
            *bos,
            *plain,
        ]


async def test_a_template_gives_the_prompt_that_chat_has(tiny: Path) -> None:
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with served(tiny) as service:
        for more in (
            {},
            {"tools": tools},
            {"tools": tools, "tool_choice": "none"},
            {"tools": tools, "tool_choice": "required"},
        ):
            prompt = (await service.answer("/apply-template", {"messages": messages, **more}))["prompt"]
            await service.answer(CHAT, {"messages": messages, **more, "max_tokens": 1})
            assert list(service.engine.rows[-1].request.prompt) == tokens_of(prompt)
            assert ("add" in prompt) == ("tools" in more and more.get("tool_choice") != "none")


REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no content": ("/tokenize", {}, 400, "content"),
    "plain special tokens": ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
    "half a surrogate pair": ("/tokenize", {"content": "\ud800"}, 400, ""),
    "an id that is no token": ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, str(VOCAB_SIZE)),
    "an id among texts": ("/tokenize", {"content": ["a", 10**30], "with_pieces": True}, 400, "content"),
    "an id below zero": ("/detokenize", {"tokens": [-1]}, 400, "-1"),
    "an enormous id": ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
    "no messages": ("/apply-template", {"messages": []}, 400, "messages"),
    "a field of generation": ("/apply-template", {"messages": [{"role": "user"}], "seed": 1}, 400, "seed"),
    "a picture": (
        "/apply-template",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        501,
        "image_url",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(tiny: Path, name: str) -> None:
    path, body, status, part = REFUSED[name]
    async with served(tiny) as service:
        content = json.dumps(body)
        response = await service.client.post(path, content=content)
        error = response.json()["error"]
        assert response.status_code == error["code"] == status
        assert part in error["message"]


async def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path, "llama"), template=None)
    async with served(tmp_path) as service:
        response = await service.post("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
