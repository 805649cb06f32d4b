"""`POST /v1/chat/completions`, in OpenAI's shapes."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import FinishReason
from server.generate import Answer, chat_prompt
from server.routes.common import (
    Dialect,
    begun,
    check_model,
    priority_of,
    read_body,
    request_id_of,
    respond,
    service_of,
)
from server.validate import ChatBody


class ChatDialect(Dialect):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any]:
        return _delta(choice, {"role": "assistant", "content": ""}, None)

    def said(self, choice: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return _delta(choice, {"content": text} if text else {}, reason)

    def answered(self, choice: int, text: str, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": choice, "message": message, "logprobs": None, "finish_reason": reason}


def _delta(choice: int, delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}


async def chat_completions(request: Request) -> Response | ASGIApp:
    service = service_of(request)
    body = await read_body(request, ChatBody)
    body.check()
    check_model(service, body.model)
    priority = priority_of(request)
    dialect = ChatDialect(request_id_of(request, "chatcmpl"), service.config.served_name)

    async def begin() -> Answer:
        model = await service.bridge.model()
        prompted = await chat_prompt(
            service.bridge,
            model,
            body.messages,
            tools=body.tools if body.tool_choice == "auto" else (),
            arguments=body.chat_template_kwargs,
        )
        return await begun(service, model, dialect, body, prompted, priority)

    return await respond(request, body, dialect, begin)
