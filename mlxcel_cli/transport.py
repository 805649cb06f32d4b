"""The in-process ASGI transport for httpx2: an app in this process, spoken to as if it were on the network.

It streams the body piece by piece, passes a closed stream on as `http.disconnect`, and drives the lifespan. It
knows ASGI and nothing of what the app does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

import httpx2

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# From 2.4 on, Starlette ends an abandoned stream only on an OSError out of `send`; 2.3 is what uvicorn declares.
ASGI = {"version": "3.0", "spec_version": "2.3"}


class InProcess(httpx2.AsyncBaseTransport):
    """Requests to `app`. Entering runs its startup, leaving its shutdown; what they raise is raised here."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._state: dict[str, Any] = {}
        self._to_lifespan: asyncio.Queue[Message] = asyncio.Queue()
        self._from_lifespan: asyncio.Queue[Message | None] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None
        self._exchanges: set[Exchange] = set()

    async def __aenter__(self) -> Self:
        scope = {"type": "lifespan", "asgi": ASGI, "state": self._state}
        lifespan = self._app(scope, self._to_lifespan.get, self._from_lifespan.put)
        self._lifespan = asyncio.ensure_future(lifespan)
        self._lifespan.add_done_callback(lambda _: self._from_lifespan.put_nowait(None))
        await self._pass_lifespan("startup")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        for exchange in self._exchanges:
            await exchange.aclose()
        if self._exchanges:
            await asyncio.wait({exchange.task for exchange in self._exchanges})
        await self._pass_lifespan("shutdown")

    async def _pass_lifespan(self, stage: str) -> None:
        assert self._lifespan is not None, "the transport was not entered"
        await self._to_lifespan.put({"type": f"lifespan.{stage}"})
        answer = await self._from_lifespan.get()
        passed = answer is not None and answer["type"] == f"lifespan.{stage}.complete"
        if not passed or stage == "shutdown":
            await self._lifespan
        if not passed:
            raise RuntimeError(f"the application's {stage} did not complete")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": None,
            "server": (request.url.host, request.url.port),
            "state": self._state.copy(),
        }
        exchange = Exchange(self._app, scope, await request.aread())
        self._exchanges.add(exchange)
        exchange.task.add_done_callback(lambda _: self._exchanges.discard(exchange))
        try:
            start = await exchange.next_message()
        except BaseException:
            await exchange.aclose()
            raise
        assert start is not None, "the application returned without a response"
        return httpx2.Response(start["status"], headers=start["headers"], stream=exchange)


class Exchange(httpx2.AsyncByteStream):
    """One request and the stream of its answer. The app runs in a task of its own, as under a network server."""

    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self._body: bytes | None = body
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._left = asyncio.Event()
        self._answered = False
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(self._returned)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more and (message := await self.next_message()) is not None:
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body

    async def aclose(self) -> None:
        """Leave: the app learns of it as `http.disconnect`. What it does then is its own affair."""
        self._left.set()

    async def next_message(self) -> Message | None:
        """What the app sends next; None when it has returned. Raises what the app raised."""
        message = await self._sent.get()
        if message is None:
            self.task.result()
        return message

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def _returned(self, task: asyncio.Future[None]) -> None:
        if self._answered and not task.cancelled() and (fault := task.exception()) is not None:
            log.error("the application failed behind its answer", exc_info=fault)  # nobody waits for it any more
        self._sent.put_nowait(None)

    async def _send(self, message: Message) -> None:
        self._answered = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not self._left.is_set():
            self._sent.put_nowait(message)
