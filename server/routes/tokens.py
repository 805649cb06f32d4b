"""llama-server's `POST /tokenize`, `/detokenize` and `/apply-template`: what a prompt is made of, and no more."""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestError
from engine.text.tokens import Tokens
from server.errors import json_response
from server.generate import check_id, spliced
from server.llama import DetokenizeBody, TemplateBody, TokenizeBody
from server.routes.common import read_body, served_of, service_of


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    served = served_of(request, body.model)
    async with service_of(request).models.leased(served, request.receive):
        tokens = (await served.bridge.model()).tokens
        parts = [body.content] if isinstance(body.content, str) else body.content
        for part in parts:
            if isinstance(part, int):
                check_id(part, tokens, "content")
        encode = functools.partial(_encode, tokens)
        ids = await served.bridge.text_work(lambda: spliced(parts, encode, add_special=body.add_special))
    return json_response({"tokens": [_piece(tokens, token) for token in ids] if body.with_pieces else ids})


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    served = served_of(request, body.model)
    async with service_of(request).models.leased(served, request.receive):
        tokens = (await served.bridge.model()).tokens
        for token in body.tokens:
            check_id(token, tokens, "tokens")
        content = await served.bridge.text_work(lambda: tokens.decode(body.tokens))
    return json_response({"content": content})


async def apply_template(request: Request) -> Response:
    asked = await read_body(request, TemplateBody)
    body = asked.chat()
    served = served_of(request, asked.model)
    async with service_of(request).models.leased(served, request.receive):
        template = (await served.bridge.model()).template
        render = functools.partial(
            template.render,
            body.messages,
            tools=body.callable,
            arguments=body.chat_template_kwargs,
            continues=body.continue_final_message,
        )
        prompt = await served.bridge.text_work(render)
    return json_response({"prompt": prompt})


def _encode(tokens: Tokens, text: str, *, add_special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise RequestError("content: the text holds half a surrogate pair", param="content") from fault
    return tokens.encode(text, add_special)


def _piece(tokens: Tokens, token: int) -> dict[str, Any]:
    """A token and its text; where that is no whole characters, its bytes."""
    spelled = tokens.spell(token)
    try:
        return {"id": token, "piece": spelled.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(spelled)}
