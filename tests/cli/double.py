"""A server that speaks the API's shapes and thinks nothing: its answers are given. It remembers what it was asked.

`answer` decides what each request gets: a list of text pieces and of events that it waits for, or an error's
status and object. What it `thinks` comes before; `listed` are its models, `usage` what it says of tokens. A word
is a token where tokens are counted. With `hold` the stream stays open after its pieces until the client leaves.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Refusal:
    status: int
    message: str
    code: str | None = None


@dataclass
class Double:
    answer: Callable[[dict[str, Any]], Sequence[str | threading.Event] | Refusal] = lambda body: ["Hel", "lo"]
    finish_reason: str = "stop"
    thinks: Sequence[str] = ()
    usage: object = None
    listed: object = ({"id": "double", "object": "model"},)
    hold: bool = False
    fails_midway: bool = False
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    lifespan: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.lifespan.append("startup")
            yield
            self.lifespan.append("shutdown")

        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/props", self.props),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def models(self, request: Request) -> Response:
        return Response(json.dumps({"object": "list", "data": self.listed}), media_type="application/json")

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(self, request: Request) -> Response:
        return JSONResponse({"default_generation_settings": {"n_ctx": 100}})

    async def count_tokens(self, request: Request) -> Response:
        body = await request.json()
        texts = [body.get("system", ""), *(message["content"] for message in body["messages"])]
        return JSONResponse({"input_tokens": sum(len(text.split()) for text in texts)})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.url.path, body))
        answer = self.answer(body)
        if isinstance(answer, Refusal):
            error = {
                "message": answer.message,
                "type": "invalid_request_error",
                "param": None,
                "code": answer.code,
            }
            return JSONResponse({"error": error}, answer.status)
        return StreamingResponse(self.frames(request.url.path, answer), media_type="text/event-stream")

    async def frames(self, path: str, pieces: Sequence[str | threading.Event]) -> AsyncIterator[str]:
        def chunk(text: str | None, finish_reason: str | None = None) -> str:
            said = (
                {"text": text or ""} if path == "/v1/completions" else {"delta": {"content": text} if text else {}}
            )
            return f"data: {json.dumps({'choices': [{'index': 0, **said, 'finish_reason': finish_reason}]})}\n\n"

        try:
            yield ": prefill 3/4\n\n"
            for thought in self.thinks:
                choice = {"index": 0, "delta": {"reasoning_content": thought}}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            for piece in pieces:
                if isinstance(piece, threading.Event):
                    await asyncio.to_thread(piece.wait)
                else:
                    yield chunk(piece)
                self.started.set()
            if self.hold:
                await asyncio.Event().wait()
            if self.fails_midway:
                yield 'data: {"error": {"message": "the forward failed", "type": "server_error"}}\n\n'
                return
            yield chunk(None, self.finish_reason)
            numbers = {
                "choices": [],
                "usage": self.usage or {"prompt_tokens": 4, "completion_tokens": len(pieces)},
                "timings": {
                    "prompt_n": 4,
                    "prompt_per_second": 40.0,
                    "predicted_n": 2,
                    "predicted_per_second": 20.0,
                },
            }
            yield f"data: {json.dumps(numbers)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.left.set()
