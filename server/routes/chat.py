"""`POST /v1/chat/completions`, in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import TokenLogprob
from server.chat import ChatBody
from server.generate import Answer
from server.logprobs import Spell, chat_body
from server.reply import CallArguments, CallBegun, Choice, Finish, Reason, Reasoning, Text
from server.routes.common import (
    Dialect,
    Said,
    priority_of,
    read_body,
    request_id_of,
    respond,
    served_of,
)
from server.routes.turns import next_turn


class ChatDialect(Dialect):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any]:
        return _delta(choice, {"role": "assistant", "content": ""}, None)

    def said(self, piece: Said) -> dict[str, Any]:
        match piece:
            case Text(choice=choice, text=text):
                return _delta(choice, {"content": text}, None)
            case Reasoning(choice=choice, text=text):
                return _delta(choice, {"reasoning_content": text}, None)
            case CallBegun(choice=choice, index=index, id=own, name=name):
                call = {"index": index, "id": own, "type": "function", "function": {"name": name, "arguments": ""}}
                return _delta(choice, {"tool_calls": [call]}, None)
            case CallArguments(choice=choice, index=index, text=text):
                return _delta(choice, {"tool_calls": [{"index": index, "function": {"arguments": text}}]}, None)
            case Finish(choice=choice, reason=reason):
                return _delta(choice, {}, reason)

    def answered(self, number: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        return {"index": number, "message": message, "logprobs": None, "finish_reason": choice.reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
        return chat_body(tokens, spell)


def _delta(choice: int, delta: dict[str, Any], reason: Reason | None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}


async def chat_completions(request: Request) -> Response | ASGIApp:
    body = await read_body(request, ChatBody)
    body.check()
    served = served_of(request, body.model)
    priority = priority_of(request)
    dialect = ChatDialect(request_id_of(request, "chatcmpl"), served.name)

    async def begin() -> Answer:
        return await next_turn(served, dialect, body, priority)

    return await respond(request, served, body, dialect, begin)
