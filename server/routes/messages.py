"""`POST /v1/messages` and `/v1/messages/count_tokens`, in Anthropic's shapes.

The whole answer is what the events of its stream have built.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.text.jsonobject import whole_part
from server.errors import json_response
from server.generate import Answer, Usage
from server.messages import NAMES, CountBody, MessagesBody
from server.reply import CallArguments, CallBegun, CallEnded, Finish, Prefilled, Reasoning, Text
from server.routes.common import (
    FramedDialect,
    priority_of,
    read_body,
    request_id_of,
    respond_framed,
    served_of,
    service_of,
)
from server.routes.turns import naming, next_turn, prompted_turn
from server.sse import Comment, Named, unless_gone

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageDialect(FramedDialect):
    """Writes one message down, block by block."""

    def __init__(self, request_id: str, served_name: str) -> None:
        super().__init__(request_id, served_name)
        self._message: dict[str, Any] = {
            "id": request_id,
            "type": "message",
            "role": "assistant",
            "model": served_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }
        self._open = ""  # the type of the block that goes on
        self._arguments = ""

    async def frames(self, answer: Answer) -> AsyncIterator[Any]:
        yield Named(type="message_start", message={**self._message, "usage": _counted(answer.usage)})
        yield Named(type="ping")
        async for piece in answer.pieces():
            match piece:
                case Prefilled(done=done, total=total):
                    yield Comment(f"prefill {done}/{total}")
                case Text(text=text):
                    for event in self._said("text", text, "text_delta"):
                        yield event
                case Reasoning(text=text):
                    for event in self._said("thinking", text, "thinking_delta"):
                        yield event
                case CallBegun(id=own, name=name):
                    for event in self._begin({"type": "tool_use", "id": own, "name": name, "input": {}}):
                        yield event
                case CallArguments(text=text):
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnded():
                    for event in self._end():
                        yield event
                case Finish(choice=choice, reason=reason):
                    for event in self._end():
                        yield event
                    word = answer.usage.stop_strings[choice] if reason == "stop" else ""
                    ended = {
                        "stop_reason": "stop_sequence" if word else STOP_REASONS[reason],
                        "stop_sequence": word or None,
                    }
                    self._message |= {**ended, "usage": _counted(answer.usage)}
                    yield Named(type="message_delta", delta=ended, usage=self._message["usage"])
                    yield Named(type="message_stop")

    async def folded(self, answer: Answer) -> dict[str, Any]:
        """The message when it has ended."""
        async for _ in self.frames(answer):
            pass
        return self._message

    def _said(self, kind: str, text: str, delta: str) -> Iterator[Named]:
        """More of a block of that kind, whose own text has the name of the kind."""
        if self._open != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signed})
        self._message["content"][-1][kind] += text
        yield self._delta({"type": delta, kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Named]:
        yield from self._end()
        self._open = block["type"]
        self._message["content"].append(block)
        yield Named(type="content_block_start", index=self._index, content_block=dict(block))

    def _delta(self, delta: dict[str, Any]) -> Named:
        return Named(type="content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterator[Named]:
        """The end of the block that goes on, if one does."""
        if not self._open:
            return
        if self._open == "tool_use":
            self._message["content"][-1]["input"] = _input(self._arguments)
        self._open, self._arguments = "", ""
        yield Named(type="content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1


def _input(arguments: str) -> Any:
    """The input of a call; of one that is not whole, the values that are, as Anthropic's client has them."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return json.loads(whole_part(arguments))


def _counted(usage: Usage) -> dict[str, Any]:
    """Tokens that were read from the prompt cache are none of the input, as Anthropic counts; known at the end."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


async def messages(request: Request) -> Response | ASGIApp:
    body = await read_body(request, MessagesBody)
    with naming(NAMES):
        chat = body.chat()
    served = served_of(request, body.model)
    priority = priority_of(request)
    dialect = MessageDialect(request_id_of(request, "msg"), served.name)

    async def begin() -> Answer:
        with naming(NAMES):
            return await next_turn(served, dialect, chat, priority)

    return await respond_framed(request, served, dialect, begin, stream=body.stream, user=chat.user)


async def count_tokens(request: Request) -> Response:
    body = await read_body(request, CountBody)
    with naming(NAMES):
        chat = body.chat()
        served = served_of(request, body.model)
        async with service_of(request).models.leased(served, request.receive):
            _, _, prompted = await unless_gone(request.receive, prompted_turn(served, chat))
    headers = {"x-request-id": request_id_of(request, "msg")}
    return json_response({"input_tokens": sum(len(ids) for ids in prompted.ids)}, headers=headers)
