"""What a server sends that is odd, or no answer at all, is one clear error of that request, or is left out."""

import asyncio
import json
import socket

import httpx2
import pytest

from engine.errors import UserError
from mlxcel_cli import errors, wire
from mlxcel_cli.client import Client
from mlxcel_cli.pieces import End, Prefill, Reasoning, Text
from tests.cli.double import Double

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
DEEP = "[" * 200_000
DONE = "data: [DONE]\n\n"


class Sent(httpx2.AsyncBaseTransport):
    """A server that answers every request with this."""

    def __init__(self, body: str | bytes, status: int = 200, **headers: str) -> None:
        self.body, self.status = body.encode() if isinstance(body, str) else body, status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.num_asked = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.num_asked += 1

        async def body():
            yield self.body

        return httpx2.Response(self.status, content=body(), headers=self.headers)


async def pieces_of(server: httpx2.AsyncBaseTransport, key: str = "") -> list:
    async with Client(server, "http://localhost", key=key) as client:
        return [piece async for piece in client.chat([], {})]


def streamed(**frame: object) -> Sent:
    return Sent(f"data: {json.dumps(frame)}\n\n{DONE}", content_type="text/event-stream")


@pytest.mark.parametrize(
    "choices",
    [
        5,
        "x",
        {"a": 1},
        [None],
        ["x"],
        [{"delta": "abc"}],
        [{"delta": []}],
        [{"delta": {"content": 5}}],
        [{"delta": {"content": [5]}}],
        [{"delta": {"content": {"text": "a"}}}],
        [{"delta": {"reasoning_content": 5}}],
        [{"text": 5}],
    ],
    ids=str,
)
async def test_choices_of_another_shape_are_no_answer(choices: object) -> None:
    with pytest.raises(errors.NoAnswer, match=r"^the server sent what no answer is: "):
        await pieces_of(streamed(choices=choices))


@pytest.mark.parametrize("choices", [None, [], [{}], [{"delta": None}], [{"finish_reason": ["a"]}]], ids=str)
async def test_what_is_left_out_of_a_frame_is_nothing(choices: object) -> None:
    assert await pieces_of(streamed(choices=choices)) == [End("")]


async def test_a_text_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "image"}, {"type": "text", "text": None}]
    assert await pieces_of(streamed(choices=[{"delta": {"content": parts}}])) == [Text("ab"), End("")]
    assert await pieces_of(streamed(choices=[{"delta": {"reasoning": parts}}])) == [Reasoning("ab"), End("")]


@pytest.mark.parametrize("data", [DEEP, "{", "[]", "5", "null"], ids=lambda data: data[:9])
async def test_a_frame_that_is_no_object_is_no_answer(data: str) -> None:
    with pytest.raises(errors.NoAnswer):
        await pieces_of(Sent(f"data: {data}\n\n{DONE}"))


@pytest.mark.parametrize("data", [DEEP, "", "<html>", "[]"], ids=lambda data: data[:9])
async def test_a_listing_that_is_no_object_is_no_answer(data: str) -> None:
    async with Client(Sent(data), "http://localhost") as client:
        with pytest.raises(errors.NoAnswer):
            await client.models()
        assert await client.context_length() is None


async def test_numbers_that_are_none_are_as_if_not_said() -> None:
    usage = {
        "prompt_tokens": "3",
        "completion_tokens": float("nan"),
        "total_tokens": 10**4000,
        "a": -5,
        "b": True,
        "c": {"d": 1},
        "prompt_tokens_details": 5,
        "completion_tokens_details": {"reasoning_tokens": 2, "x": "\x1b[31m"},
        "ok": 7,
    }
    timings = {"predicted_per_second": "fast", "prompt_per_second": [1], "draft_kind": "mtp", "predicted_n": 1.5}
    assert await pieces_of(streamed(choices=[], usage=usage, timings=timings)) == [
        End(
            "",
            {"completion_tokens_details": {"reasoning_tokens": 2}, "ok": 7},
            {"draft_kind": "mtp", "predicted_n": 1.5},
        )
    ]


@pytest.mark.parametrize("comment", [f"prefill {'9' * 5000}/5", "prefill ²/³", "prefill 1", "prefill /", "other"])
def test_a_comment_that_tells_no_progress_is_nothing(comment: str) -> None:
    assert wire.progress_of(comment) is None
    assert wire.progress_of("prefill 3/4") == Prefill(3, 4)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_that_is_not_in_its_encoding_is_no_answer(status: int) -> None:
    server = Sent("no gzip", status, content_encoding="gzip")
    with pytest.raises(errors.NoAnswer, match="content-encoding"):
        await pieces_of(server)
    async with Client(server, "http://localhost") as client:
        with pytest.raises(errors.NoAnswer, match="content-encoding"):
            await client.models()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Sent('{"choices": []}', content_type="application/json"), "a whole answer, where a stream was asked for"),
        (Sent('{"error": {"message": "no room"}}', content_type="application/json; charset=utf-8"), "^no room$"),
        (Sent("<html>", content_type="text/html"), "no answer is: HTML"),
        (Sent("", 204), "no answer is: nothing"),
        (Sent("", 307, location="http://b/v1"), "status 307: it sends requests on to http://b/v1"),
        (Sent("", 302, location="http://me:PW@b/v1"), r"sends requests on to http://\*\*\*@b/v1"),
        (Sent("", 304), "status 304"),
        (Sent('{"error": {"message": null}}', 400), "status 400"),
        (Sent('{"error": {"message": {"a": 1}, "code": ["x"]}}', 400), "status 400"),
        (Sent(DEEP, 400), "status 400"),
        (Sent('data: {"error": {"message": null}}\n\n'), "the server failed in mid-answer"),
    ],
)
async def test_what_came_in_place_of_a_stream_is_said(server: Sent, said: str) -> None:
    with pytest.raises(errors.MlxcelError, match=said):
        await pieces_of(server)


@pytest.mark.parametrize("key", ["SECRET\nx", "SE CRET", "SÉCRET", "SECRET\x00", " ", "\n"], ids=repr)
async def test_a_key_that_cannot_be_one_is_refused_before_anything_is_sent(key: str) -> None:
    server = Sent(DONE)
    with pytest.raises(UserError, match=r"^the API key for http://localhost cannot be one$") as raised:
        await pieces_of(server, key)
    assert "CRET" not in f"{raised.value} {raised.value.hint}"
    assert not server.num_asked


async def test_white_space_around_a_key_is_not_sent() -> None:
    double = Double()
    seen: list[str | None] = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            seen.append(dict(scope["headers"]).get(b"authorization"))
        await double.app()(scope, receive, send)

    async with Client(httpx2.ASGITransport(app), "http://localhost", key=f"{KEY} \r\n") as client:
        await client.models()
    assert seen == [f"Bearer {KEY}".encode()]


@pytest.mark.parametrize("status", [200, 401])
async def test_a_server_that_repeats_the_key_does_not_have_it_shown(status: int) -> None:
    said = json.dumps({"error": {"message": f"wrong key Bearer {KEY}"}})
    server = Sent(f"data: {said}\n\n" if status == 200 else said, status)
    with pytest.raises(errors.MlxcelError, match=r"^wrong key Bearer \*\*\*$"):
        await pieces_of(server, KEY)


@pytest.mark.parametrize(
    "address",
    ["http://me:PW@127.0.0.1:1", "htp://me:PW@h", "me:PW@h:80", "http://me:P/W@h", "http://me:PW@h:99999"],
)
async def test_a_password_in_an_address_is_not_shown(address: str) -> None:
    with pytest.raises(errors.MlxcelError) as raised:
        async with Client.to(address) as client:
            await client.models()
    assert "W" not in str(raised.value)
    assert "***@" in str(raised.value)


async def test_the_listing_of_models_has_a_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with Client.to(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            with pytest.raises(errors.ServerGone, match=r"did not list its models within 0\.05 s"):
                await client.models(0.05)


async def test_a_server_that_never_ends_its_listing_is_not_waited_for() -> None:
    class Dripping(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            async def body():
                while True:
                    yield b"{"
                    await asyncio.sleep(0)

            return httpx2.Response(200, content=body())

    async with Client(Dripping(), "http://localhost") as client:
        with pytest.raises(errors.ServerGone, match="did not list its models"):
            await client.models(0.05)
