"""The client reads streams however they are cut, and turns what a server says into types."""

import httpx2
import pytest

from engine.errors import UserError
from mlxcel_cli import errors
from mlxcel_cli.client import Client, EventStream
from mlxcel_cli.pieces import End, Prefill, Text
from mlxcel_cli.transport import InProcess
from tests.cli.double import Double, Refusal

pytestmark = pytest.mark.anyio

STREAM = (
    ": prefill 3/4\n\n"
    'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "né\U0001f600"}}]}\n\n'
    "event: ignored\nid: 7\n\n"
    'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": null}\n\n'
    'data: {"choices": [],\ndata: "usage": {"completion_tokens": 1}, "timings": {"prompt_n": 4}}\n\n'
    "data: [DONE]\n\n"
)
PIECES = [Prefill(3, 4), Text("né\U0001f600"), End("stop", {"completion_tokens": 1}, {"prompt_n": 4})]


class Cut(httpx2.AsyncBaseTransport):
    """A server that sends these pieces of a stream."""

    def __init__(self, pieces: list[bytes], status: int = 200) -> None:
        self.pieces, self.status = pieces, status

    async def handle_async_request(self, request):
        async def body():
            for piece in self.pieces:
                yield piece

        return httpx2.Response(self.status, content=body())


async def pieces_of(transport: httpx2.AsyncBaseTransport) -> list:
    async with Client(transport, "http://localhost") as client:
        return [piece async for piece in client.chat([{"role": "user", "content": "hi"}], {})]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_wherever_the_stream_is_cut(line_end):
    content = STREAM.replace("\n", line_end).encode()
    whole = EventStream().feed(content)
    assert [kind for kind, _ in whole] == ["comment", *["data"] * 5]
    for at in range(len(content)):
        events = EventStream()
        assert events.feed(content[:at]) + events.feed(content[at:]) == whole, at
    events = EventStream()
    assert [event for i in range(len(content)) for event in events.feed(content[i : i + 1])] == whole


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_becomes_its_pieces(size):
    content = STREAM.encode()
    cut = Cut([content[at : at + size] for at in range(0, len(content), size)])
    assert await pieces_of(cut) == PIECES


@pytest.mark.parametrize("at", ["", "data: {", 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'])
async def test_a_stream_without_its_end_mark_is_an_error(at):
    with pytest.raises(errors.ServerGone, match="broke off"):
        await pieces_of(Cut([at.encode()]))


async def test_an_error_after_the_start_comes_after_the_pieces_before_it():
    async with Client(InProcess(Double(fails_midway=True).app()), "http://localhost") as client:
        pieces = client.complete("x", {})
        assert [await anext(pieces) for _ in range(3)] == [Prefill(3, 4), Text("Hel"), Text("lo")]
        with pytest.raises(errors.ServerFault, match="the forward failed"):
            await anext(pieces)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, errors.Refused),
        (400, "no_chat_template", errors.NoTemplate),
        (404, "model_not_found", errors.Refused),
        (501, None, errors.Refused),
        (500, None, errors.ServerFault),
        (503, "queue_full", errors.ServerBusy),
        (503, "model_not_loaded", errors.EngineGone),
        (503, "engine_stopped", errors.EngineGone),
    ],
)
async def test_a_refusal_comes_back_as_its_type_with_the_servers_words(status, code, kind):
    double = Double(answer=lambda body: Refusal(status, "the words", code))
    with pytest.raises(errors.MlxcelError, match=r"^the words$") as raised:
        await pieces_of(InProcess(double.app()))
    assert type(raised.value) is kind


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": null}', b'{"detail": "no"}'])
async def test_a_refusal_without_words_names_its_status(body):
    with pytest.raises(errors.Refused, match="status 418"):
        await pieces_of(Cut([body], 418))


async def test_a_frame_that_is_no_object_is_an_error():
    with pytest.raises(errors.NoAnswer, match="the server sent what no answer is: no JSON") as raised:
        await pieces_of(Cut([b"data: nonsense\n\n"]))
    assert "OpenAI-compatible" in raised.value.hint


async def test_only_what_was_asked_is_sent():
    double = Double()
    async with Client(InProcess(double.app()), "http://localhost", model="m") as client:
        [_ async for _ in client.complete("x", {"seed": 3})]
    ((path, body),) = double.asked
    assert path == "/v1/completions"
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"model": "m", "prompt": "x", "seed": 3, **stream}


async def test_what_is_no_text_is_not_sent():
    double = Double()
    async with Client(InProcess(double.app()), "http://localhost") as client:
        with pytest.raises(UserError, match="not UTF-8"):
            await anext(client.complete("a\udcff", {}))
    assert double.asked == []


async def test_models_and_health():
    async with Client(InProcess(Double().app()), "http://localhost") as client:
        assert await client.models() == ["double"]
        assert await client.health() == "ok"


@pytest.mark.parametrize("address", ["", "localhost:8080", "ftp://host", "http://", "/tmp/socket"])
async def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match="not the address"):
        Client.to(address)


async def test_an_address_where_nobody_answers(tmp_path):
    path = str(tmp_path / "nobody.sock")
    async with Client.to(path) as client:
        with pytest.raises(errors.ServerGone, match=r"no server answers at .*nobody\.sock"):
            await client.models()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_an_address_may_end_in_v1(address, double, suffix):
    async with Client.to(address + suffix) as client:
        assert [piece async for piece in client.chat([], {})][-1].finish_reason == "stop"
    assert double.asked[0][0] == "/v1/chat/completions"
