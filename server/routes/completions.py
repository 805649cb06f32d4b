"""`POST /v1/completions`, in OpenAI's shapes: raw continuation, no chat template."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import FinishReason
from server.generate import Answer, text_prompts
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
from server.validate import CompletionBody


class CompletionDialect(Dialect):
    object = "text_completion"
    chunk_object = "text_completion"
    echoed: Sequence[str] = ()  # the text before each choice, where that is asked for

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self.said(choice, self.echoed[choice], None) if self.echoed else None

    def said(self, choice: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}

    def answered(self, choice: int, text: str, reason: FinishReason) -> dict[str, Any]:
        before = self.echoed[choice] if self.echoed else ""
        return self.said(choice, before + text, reason)


async def completions(request: Request) -> Response | ASGIApp:
    service = service_of(request)
    body = await read_body(request, CompletionBody)
    body.check()
    check_model(service, body.model)
    priority = priority_of(request)
    prompts = body.prompts()
    dialect = CompletionDialect(request_id_of(request, "cmpl"), service.config.served_name)

    async def begin() -> Answer:
        model = await service.bridge.model()
        prompted = await text_prompts(service.bridge, model, prompts, num_choices=body.n)
        if body.echo:
            texts = [prompt if isinstance(prompt, str) else model.tokens.decode(prompt) for prompt in prompts]
            dialect.echoed = [text for text in texts for _ in range(body.n)]
        return begun(service, model, dialect, body, prompted, priority)

    return await respond(request, body, dialect, begin)
