"""The in-process transport streams, tells of a client that left, and drives the lifespan."""

import asyncio
import contextlib

import httpx2
import pytest
from starlette.applications import Starlette

from mlxcel_cli.transport import InProcess
from tests.cli.double import Double

pytestmark = pytest.mark.anyio


def client_of(app) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost")


def app_of(handle, lifespan=None):
    """An app that answers every request by `handle`."""
    starlette = Starlette(lifespan=lifespan)

    async def app(scope, receive, send):
        await (handle if scope["type"] == "http" else starlette)(scope, receive, send)

    return app


async def test_a_piece_arrives_before_the_next_one_is_sent():
    more = asyncio.Event()

    async def handle(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async with client_of(app_of(handle)) as client, client.stream("GET", "/") as response:
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"one"
        more.set()
        assert [piece async for piece in pieces] == [b"two"]


async def test_a_closed_stream_reaches_the_app_as_a_disconnect():
    double = Double(hold=True)
    async with client_of(double.app()) as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "x"}) as response:
            await anext(response.aiter_raw())
            assert not double.left.is_set()
        await double.left.wait()


async def test_a_cancelled_wait_for_the_response_reaches_the_app_as_a_disconnect():
    waiting, told = asyncio.Event(), []

    async def handle(scope, receive, send):
        told.append((await receive())["type"])
        waiting.set()
        told.append((await receive())["type"])

    async with client_of(app_of(handle)) as client:
        request = asyncio.ensure_future(client.get("/"))
        await waiting.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert told == ["http.request", "http.disconnect"]


async def test_the_app_is_told_what_a_network_server_would_tell_it():
    seen = {}

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield {"shared": "yes"}

    async def handle(scope, receive, send):
        seen.update(scope, body=(await receive())["body"])
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    async with client_of(app_of(handle, lifespan)) as client:
        response = await client.post("/a%20b?c=d", content=b"body", headers={"X-Thing": "1"})
    assert (response.status_code, response.headers["x-a"], response.content) == (201, "b", b"")
    assert seen["asgi"]["spec_version"] == "2.3"
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/a b", b"c=d")
    assert (seen["raw_path"], seen["body"], seen["state"]) == (b"/a%20b", b"body", {"shared": "yes"})
    assert (b"x-thing", b"1") in seen["headers"]


async def test_entering_and_leaving_run_the_lifespan():
    double = Double()
    async with client_of(double.app()):
        assert double.lifespan == ["startup"]
    assert double.lifespan == ["startup", "shutdown"]


async def test_what_the_startup_raises_is_raised():
    def lifespan(app):
        raise LookupError("no model")

    with pytest.raises(LookupError, match="no model"):
        async with client_of(Starlette(lifespan=lifespan)):
            pass


@pytest.mark.parametrize("after_start", [False, True])
async def test_what_the_app_raises_is_raised(after_start):
    async def handle(scope, receive, send):
        if after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError("broken")

    async with client_of(app_of(handle)) as client:
        with pytest.raises(LookupError, match="broken"):
            await client.get("/")


async def test_what_the_app_raises_behind_its_answer_is_logged(caplog):
    async def handle(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"sorry"})
        raise KeyError("ours")

    async with client_of(app_of(handle)) as client:
        assert (await client.get("/")).text == "sorry"
    [record] = [record for record in caplog.records if record.name == "mlxcel_cli.transport"]
    assert "KeyError: 'ours'" in caplog.text
    assert record.levelname == "ERROR"


async def test_leaving_waits_for_the_requests_that_still_run():
    double = Double(hold=True)
    async with client_of(double.app()) as client:
        response = await client.send(
            client.build_request("POST", "/v1/completions", json={"prompt": "x"}), stream=True
        )
        await anext(response.aiter_raw())
    assert double.left.is_set()
    assert double.lifespan == ["startup", "shutdown"]
