"""However a reply is cut into chunks, each dialect's stream has the same items and blocks in it."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from engine.text.filter import PLAIN_CALLS, THINK, Markup
from engine.text.toolcalls import ToolCalls
from server.continued import Responses
from server.generate import Usage
from server.items import ResponsesBody
from server.reply import AnswerPiece, Reader, Reading
from server.routes.messages import MessageDialect
from server.routes.responses import ResponseDialect
from tests.replies import ADD, CALL, OTHER, SUB, chunkings

pytestmark = pytest.mark.anyio

UNREADABLE = "<tool_call>\n{not}\n</tool_call>"
TEXT = f"<think>I plan.</think>\n\nFirst.\n{CALL}\n{UNREADABLE}\n{OTHER}"
TOLD = '{"a": "' + "x" * 80
LONGER = f"{OTHER.replace('{}', TOLD + chr(34) + '}')}\n{OTHER.replace('{}', TOLD + chr(92) + 'd')}\n{CALL}"
MARKUP = Markup(THINK, PLAIN_CALLS)


class Spoken:
    """An answer that comes in these chunks."""

    def __init__(self, chunks: Sequence[str]) -> None:
        self.usage = Usage(stop_strings={0: ""})
        self._chunks = chunks

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        filter_, reader = MARKUP.filter(), Reader(0, Reading(ToolCalls(MARKUP), (ADD, SUB)))
        for chunk in self._chunks:
            for piece in reader.pieces(filter_.feed(chunk)):
                yield piece
        for piece in reader.pieces(filter_.finish(), "stop"):
            yield piece


def blocks(message: dict[str, Any]) -> list[Any]:
    keys = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [block[keys[block["type"]]] for block in message["content"]]


def items(response: dict[str, Any]) -> list[Any]:
    return [item["content"][0]["text"] if "content" in item else item["arguments"] for item in response["output"]]


async def test_blocks_and_items_are_the_same_whatever_the_chunks_are() -> None:
    said = ["I plan.", "First.", {"a": 2}, f"{UNREADABLE}\n", {}]
    for chunks in chunkings(TEXT):
        answer: Any = Spoken(chunks)
        message = await MessageDialect("m", "tiny").folded(answer)
        assert blocks(message) == said
        kept = Responses()
        dialect = ResponseDialect("r", "tiny", ResponsesBody(input="hi"), (), kept)
        response = await dialect.folded(answer)
        assert items(response) == [*said[:2], '{"a": 2}', said[3], "{}"]
        assert kept.conversation("r")[1:] == response["output"]


async def test_a_call_that_breaks_is_a_block_and_an_item_as_far_as_it_came() -> None:
    for chunks in chunkings(LONGER):
        answer: Any = Spoken(chunks)
        message = await MessageDialect("m", "tiny").folded(answer)
        assert blocks(message) == [json.loads(TOLD + '"}'), {}, "d}\n\n", {"a": 2}]
        response = await ResponseDialect("r", "tiny", ResponsesBody(input="hi"), (), Responses()).folded(answer)
        assert items(response) == [TOLD + '"}', TOLD + "\\", "d}\n\n", '{"a": 2}']
        assert [item["status"] for item in response["output"]] == [
            "completed", "incomplete", "completed", "completed",
        ]  # fmt: skip
