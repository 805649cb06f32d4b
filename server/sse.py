"""Server-sent events: framing, keep-alive by the wall clock, errors after the start, the vanished client.

A stream that succeeds ends with `data: [DONE]`; one that fails ends with an error frame and without it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from engine.errors import MlxcelError
from server.errors import Shape, error_body

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection: nobody waits for an answer any more."""


class Comment(str):
    """A line that clients skip; it shows that the server is alive."""

    __slots__ = ()


class Named(dict[str, Any]):
    """A body whose event has the name of its type, as in Anthropic's and in OpenAI's newer streams."""


def data_frame(body: Any) -> bytes:
    name = b"event: " + body["type"].encode() + b"\n" if isinstance(body, Named) else b""
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_frame(error: Exception, shape: Shape) -> bytes:
    """An error after the start. Anthropic's clients know it by the name of its event."""
    return (b"event: error\n" if shape == "anthropic" else b"") + data_frame(error_body(error, shape))


def comment_frame(text: str) -> bytes:
    return f": {text}\n\n".encode()


async def unless(interruption: Awaitable[Exception], work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when `interruption` comes first. Raises what that gives then."""
    working = asyncio.ensure_future(work)
    interrupting = asyncio.ensure_future(interruption)
    try:
        await asyncio.wait((working, interrupting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise interrupting.result()
    finally:
        await _cancelled(working, interrupting)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first. Raises ClientGone then."""
    return await unless(_disconnected(receive), work)


class EventStream:
    """An ASGI response that sends `frames` as they come: JSON bodies, or Comments.

    `close` is called at the end, however it comes, and `on_error` with what ended the stream before its time.
    Silence is broken by a comment every `keep_alive_s`. An error is a frame in its dialect's `shape`; `done` marks
    a stream that succeeds.
    """

    def __init__(
        self,
        frames: AsyncIterator[Any],
        *,
        close: Callable[[], None],
        keep_alive_s: float,
        on_error: Callable[[Exception], None] = lambda error: None,
        headers: dict[str, str] | None = None,
        shape: Shape = "openai",
        done: bytes = DONE,
    ) -> None:
        self._frames = frames
        self._shape: Shape = shape
        self._done = done
        self._on_error = on_error
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **(headers or {}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        try:
            await unless_gone(receive, self._send(raw_headers, send))
        except (ClientGone, OSError):
            self._on_error(ClientGone())
        finally:
            self._close()

    async def _send(self, raw_headers: list[tuple[bytes, bytes]], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        async for frame in _with_keep_alive(self._encoded(), self._keep_alive_s):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encoded(self) -> AsyncIterator[bytes]:
        try:
            async for frame in self._frames:
                yield comment_frame(frame) if isinstance(frame, Comment) else data_frame(frame)
        except MlxcelError as error:
            self._on_error(error)
            yield error_frame(error, self._shape)
        except Exception as fault:
            log.exception("a stream failed")
            self._on_error(fault)
            yield error_frame(fault, self._shape)
        else:
            if self._done:
                yield self._done


async def _with_keep_alive(frames: AsyncIterator[bytes], silence_s: float) -> AsyncIterator[bytes]:
    """`frames`, with a comment wherever `silence_s` pass without one."""
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait((following,), timeout=silence_s)
            if not done:
                yield comment_frame("keep-alive")
                continue
            try:
                frame = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield frame
    finally:
        if following is not None:
            await _cancelled(following)


async def _disconnected(receive: Receive) -> ClientGone:
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until they have ended; what they raised by then was reported or is moot."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
