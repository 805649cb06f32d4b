"""Event streams: framing, silence broken by the wall clock, errors after the start, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.errors import QueueFull
from server.sse import ClientGone, Comment, EventStream, comment_frame, data_frame, unless_gone

pytestmark = pytest.mark.anyio


class Connection:
    """Both ends of one ASGI exchange."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        self.left = asyncio.Event()
        self.broken = False

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.broken:
            raise OSError("the connection is closed")
        async with self.news:
            self.sent.append(message)
            self.news.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(true), 10)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def run(self, frames: AsyncIterator[Any], keep_alive_s: float = 10.0) -> int:
        """Send `frames`; how often the stream was closed."""
        closed: list[None] = []
        stream = EventStream(frames, close=lambda: closed.append(None), keep_alive_s=keep_alive_s)
        await stream({"type": "http"}, self.receive, self.send)
        return len(closed)


async def given(*frames: Any) -> AsyncIterator[Any]:
    for frame in frames:
        if isinstance(frame, Exception):
            raise frame
        yield frame


def test_frames_end_with_a_blank_line_and_hold_one_line() -> None:
    for value in ("a\nb", "\r\n\r\n", "\u2028", "data: x"):
        frame = data_frame({"text": value})
        assert frame.startswith(b"data: ")
        assert frame.endswith(b"\n\n")
        assert len(frame.splitlines()) == 2
        assert json.loads(frame[6:]) == {"text": value}
    assert comment_frame("prefill 1/2") == b": prefill 1/2\n\n"


async def test_a_stream_that_succeeds() -> None:
    connection = Connection()
    assert await connection.run(given({"a": 1}, Comment("hm"), {"b": 2})) == 1
    assert connection.sent[0]["status"] == 200
    assert dict(connection.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert connection.body == b'data: {"a":1}\n\n: hm\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    assert [message.get("more_body") for message in connection.sent[1:]] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("error", "said"),
    [(QueueFull("too many"), "too many"), (KeyError("a secret"), "internal"), (OSError("a disk"), "internal")],
)
async def test_a_stream_that_fails(error: Exception, said: str) -> None:
    connection = Connection()
    assert await connection.run(given({"a": 1}, error)) == 1
    *_, last = connection.body.split(b"\n\n")[:-1]
    assert said in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert b"[DONE]" not in connection.body
    assert connection.sent[-1]["more_body"] is False


async def test_silence_is_broken_and_nothing_is_lost() -> None:
    connection = Connection()
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[Any]:
        yield {"a": 1}
        await go_on.wait()
        yield {"b": 2}

    running = asyncio.ensure_future(connection.run(slow(), keep_alive_s=0.01))
    await connection.until(lambda: connection.body.count(b": keep-alive\n\n") >= 3)
    go_on.set()
    assert await running == 1
    told = connection.body.replace(b": keep-alive\n\n", b"")
    assert told == b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'


async def test_headers_go_before_the_first_frame() -> None:
    connection = Connection()
    never = asyncio.Event()

    async def silent() -> AsyncIterator[Any]:
        await never.wait()
        yield {}

    running = asyncio.ensure_future(connection.run(silent()))
    await connection.until(lambda: bool(connection.sent))
    connection.left.set()
    assert await running == 1
    assert len(connection.sent) == 1


async def test_a_client_that_leaves_ends_the_frames() -> None:
    connection = Connection()
    ended: list[str] = []

    async def endless() -> AsyncIterator[Any]:
        try:
            yield {}
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    running = asyncio.ensure_future(connection.run(endless()))
    await connection.until(lambda: b"data:" in connection.body)
    connection.left.set()
    assert await running == 1
    assert ended == ["ended"]


async def test_a_send_that_fails_is_a_client_that_left() -> None:
    connection = Connection()
    connection.broken = True
    assert await connection.run(given({"a": 1})) == 1


async def test_work_ends_with_its_client() -> None:
    connection = Connection()
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    running = asyncio.ensure_future(unless_gone(connection.receive, work()))
    await asyncio.wait([running], timeout=0)
    connection.left.set()
    with pytest.raises(ClientGone):
        await running
    assert cancelled == [True]


async def test_work_that_is_done_is_given_although_the_client_left() -> None:
    connection = Connection()
    connection.left.set()

    async def work() -> int:
        return 7

    assert await unless_gone(connection.receive, work()) == 7
    with pytest.raises(KeyError):
        await unless_gone(connection.receive, given_error())


async def given_error() -> None:
    raise KeyError("no")
