"""`POST /v1/completions`, in OpenAI's shapes: raw continuation, no chat template."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.request import TokenLogprob
from server.bodies import CompletionBody
from server.generate import Answer, text_prompts
from server.logprobs import Spell, completion_body
from server.reply import Choice, Finish, Reason, Text
from server.routes.common import (
    Dialect,
    Said,
    begun,
    priority_of,
    read_body,
    request_id_of,
    respond,
    served_of,
)


class CompletionDialect(Dialect):
    object = "text_completion"
    chunk_object = "text_completion"
    echoed: Sequence[str] = ()  # the text before each choice, where that is asked for

    def opening(self, choice: int) -> dict[str, Any] | None:
        return _entry(choice, self.echoed[choice], None) if self.echoed else None

    def said(self, piece: Said) -> dict[str, Any]:
        match piece:
            case Text(choice=choice, text=text):
                return _entry(choice, text, None)
            case Finish(choice=choice, reason=reason):
                return _entry(choice, "", reason)
        raise AssertionError("a raw completion is text alone")

    def answered(self, number: int, choice: Choice) -> dict[str, Any]:
        before = self.echoed[number] if self.echoed else ""
        return _entry(number, before + choice.text, choice.reason)

    def logprobs(self, tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
        return completion_body(tokens, spell)


def _entry(choice: int, text: str, reason: Reason | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}


async def completions(request: Request) -> Response | ASGIApp:
    body = await read_body(request, CompletionBody)
    body.check()
    served = served_of(request, body.model)
    priority = priority_of(request)
    prompts = body.prompts()
    dialect = CompletionDialect(request_id_of(request, "cmpl"), served.name)

    async def begin() -> Answer:
        model = await served.bridge.model()
        prompted = await text_prompts(served.bridge, model, prompts, num_choices=body.n)
        if body.echo:
            texts = [prompt if isinstance(prompt, str) else model.tokens.decode(prompt) for prompt in prompts]
            dialect.echoed = [text for text in texts for _ in range(body.n)]
        return await begun(served, model, dialect, body, prompted, priority)

    return await respond(request, served, body, dialect, begin)
