"""What the tests of the server share: an app in this process, a live server, scripted tokens, and a gate.

The engine is always the real one on a tiny real model; a script takes the place of the sampler step alone.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import mlx.core as mx
from starlette.applications import Starlette

from engine.cache import adapter
from engine.config import EngineConfig
from engine.engine import Engine, Sampler
from engine.kernels import native
from engine.loop import EngineLoop, Ticket
from engine.model.load import load
from engine.plan import Tick
from engine.probe import Verdict
from engine.request import Event, Request, Row
from engine.sample.chain import sample
from engine.sample.state import Draw, noise_key
from mlxcel_cli.transport import InProcess
from server import run
from server.app import make_app
from server.config import ServerConfig
from tests.tiny import END_OF_TURN, byte_tokenizer

PATIENCE_S = 30.0  # how long a test waits for what must happen
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def tokens_of(text: str) -> list[int]:
    """Ids of `text` in the byte-level vocabulary of the tiny checkpoints: one for each byte."""
    return byte_tokenizer().encode(text).ids


class ScriptedSampler:
    """A sampler step whose tokens are given, by the seed of the request and the output index.

    A script that is used up goes on with the end of the turn. An exception in a script is raised in its place.
    """

    def __init__(self, scripts: Mapping[int, Sequence[int | Exception]], *, choices: int = 1) -> None:
        self._tokens = {
            noise_key(seed, choice, index): token
            for seed, script in scripts.items()
            for choice in range(choices)
            for index, token in enumerate(script)
        }

    def __call__(self, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
        assert logits.shape[0] == len(draws)
        tokens = [self._tokens.get(draw.key, END_OF_TURN) for draw in draws]
        for token in tokens:
            if isinstance(token, Exception):
                raise token
        return mx.array(tokens, mx.int32)


class Gate:
    """Where the engine can be held before a tick. It starts open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = float("inf")
        self._num_held = 0
        self._num_passed = 0

    def shut(self) -> None:
        """Hold the engine before its next tick."""
        with self._changed:
            self._permits = 0.0

    def let(self, num_ticks: float) -> None:
        """Let that many more ticks pass."""
        with self._changed:
            self._permits += num_ticks
            self._changed.notify_all()

    def open(self) -> None:
        self.let(float("inf"))

    def pass_through(self) -> None:
        """Called by the engine's thread before each tick."""
        with self._changed:
            self._num_held += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits > 0, PATIENCE_S), "the gate was never opened"
            self._num_held -= 1
            self._permits -= 1
            self._num_passed += 1

    async def engine_held(self) -> None:
        """Wait until the engine stands before the shut gate."""
        await asyncio.to_thread(self._wait, lambda: self._num_held > 0 and self._permits == 0)

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(until, PATIENCE_S), "the engine never came to the gate"


class WatchedEngine(Engine):
    """The engine, which keeps what it was asked to do and passes a gate before each tick.

    It runs on the compiled kernels where they are there, as a server does, and on one thread of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        sampler: Sampler = sample,
        gate: Gate | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        adapter.install_attention()
        self.loaded_on = threading.get_ident()
        compiled = not config.portable and isinstance(native.start(1), native.Native)
        super().__init__(load(config.model, compiled=compiled), config, sampler=sampler, verdict=verdict)
        self.gate = gate or Gate()
        self.rows: list[Row] = []
        self.ticks: list[Tick] = []
        self.ran_on: set[int] = set()

    def submit(self, request: Request) -> Row:
        row = super().submit(request)
        self.rows.append(row)
        return row

    def run(self, tick: Tick) -> list[Event]:
        self.gate.pass_through()
        self.ticks.append(tick)
        self.ran_on.add(threading.get_ident())
        return super().run(tick)

    def ran(self, row: Row) -> bool:
        """Whether any tick held `row`."""
        return any(row in tick.rows for tick in self.ticks)


class _Probe:
    """A letter to the loop that changes nothing: when it is read, all mail before it has been."""

    def __init__(self) -> None:
        self.read = threading.Event()

    @property
    def ended(self) -> bool:
        self.read.set()
        return True


def settle(loop: EngineLoop) -> None:
    """Wait until no request is live and the turn that ended the last is over; an assertion fails if one stays."""
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE_S, deadline.set)
    timer.start()
    try:
        lives = True
        while lives and not deadline.is_set() and loop.is_alive:
            lives = bool(loop._num_live)
            probe = _Probe()
            loop.cancel(probe)  # type: ignore[arg-type]
            while loop.is_alive and not probe.read.wait(0.1):
                pass
    finally:
        timer.cancel()
        timer.join()
    assert loop._num_live == 0, f"{loop._num_live} requests are still counted"
    assert not loop._tickets, "a ticket outlived its request"


@dataclass
class Stream:
    """One answered stream: its objects, its comments, and whether it ended well."""

    status: int
    headers: httpx2.Headers
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]

    def entries(self, choice: int = 0) -> list[dict[str, Any]]:
        return [e for chunk in self.chunks for e in chunk.get("choices", ()) if e["index"] == choice]

    def deltas(self, choice: int = 0) -> list[str]:
        return [e["delta"].get("content", "") if "delta" in e else e["text"] for e in self.entries(choice)]

    def text(self, choice: int = 0) -> str:
        return "".join(self.deltas(choice))

    def reasons(self, choice: int = 0) -> list[str]:
        return [e["finish_reason"] for e in self.entries(choice) if e["finish_reason"] is not None]


async def frames(response: httpx2.Response) -> AsyncIterator[str]:
    """The frames of an event stream, each as its text without the blank line that ends it."""
    held = ""
    async for text in response.aiter_text():
        held += text
        *whole, held = held.split("\n\n")
        for frame in whole:
            yield frame
    assert held == "", f"a frame without an end: {held!r}"


class Served:
    """An app in this process and a client that speaks to it."""

    def __init__(self, app: Starlette, transport: InProcess, client: httpx2.AsyncClient, gate: Gate) -> None:
        self.app = app
        self.client = client
        self.gate = gate
        self.engines: list[WatchedEngine] = []
        self._transport = transport
        self._submitted = threading.Condition()

    @property
    def engine(self) -> WatchedEngine:
        return self.engines[0]

    @property
    def loop(self) -> EngineLoop:
        loop: EngineLoop = self.app.state.service.models.default.bridge._loop
        return loop

    async def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return await self.client.post(path, json=body, **options)

    async def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer; anything but 200 fails the test."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        answered: dict[str, Any] = response.json()
        return answered

    async def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """The whole stream of an answer."""
        async with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            stream = Stream(response.status_code, response.headers)
            if response.status_code != 200:
                await response.aread()
                stream.chunks.append(response.json())
                return stream
            async for frame in frames(response):
                assert not stream.done, f"a frame after the end: {frame!r}"
                if frame.startswith(": "):
                    stream.comments.append(frame[2:])
                elif frame == "data: [DONE]":
                    stream.done = True
                else:
                    name, _, data = frame.rpartition("data: ")
                    stream.chunks.append(json.loads(data))
                    assert name in ("", f"event: {stream.chunks[-1].get('type')}\n"), frame
            return stream

    def count_submissions(self) -> None:
        """Have `submitted` hear of every submission."""
        submit = self.loop.submit

        def counted(*arguments: Any, **options: Any) -> Ticket:
            ticket = submit(*arguments, **options)
            with self._submitted:
                self._submitted.notify_all()
            return ticket

        self.loop.submit = counted  # type: ignore[method-assign]

    async def submitted(self, num_requests: int) -> None:
        """Wait until that many requests are live."""

        def wait() -> None:
            with self._submitted:
                enough = self._submitted.wait_for(lambda: self.loop._num_live == num_requests, PATIENCE_S)
            assert enough, f"{self.loop._num_live} are live"

        await asyncio.to_thread(wait)

    async def warmed_up(self) -> None:
        """Wait until what was expected of next turns is stored."""
        model = self.app.state.service.models.default
        while model.conversations.tasks:
            await asyncio.wait(model.conversations.tasks)
        warm_ups = self.loop._warm_ups
        assert warm_ups is not None, "the engine does not run"
        while self.loop._expected or warm_ups.has_work:
            await model.bridge.cache_stats()  # answered once between two pieces

    async def exchanges_ended(self, *, but: int = 0) -> None:
        """Wait until the app has returned from all requests but some, those included that were left."""
        while len(tasks := {exchange.task for exchange in self._transport._exchanges}) > but:
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert ended, "the app does not return"


@asynccontextmanager
async def served(
    checkpoint: Path,
    *,
    sampler: Sampler = sample,
    open_engine: Callable[[EngineConfig], Engine] | None = None,
    on_fault: Callable[[Exception], None] = lambda fault: None,
    keep_alive_s: float = 10.0,
    alias: str = "",
    clock: Callable[[], float] = time.perf_counter,
    stall_timeout: float = 60.0,
    no_warmup_next_turn: bool = True,
    gate: Gate | None = None,
    server: Mapping[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Served]:
    """A served tiny model, loaded unless `open_engine` is given. No next turn is warmed up unless asked for.

    At the end no request may be live and no row may hold storage.
    """
    gate = gate or Gate()
    config = ServerConfig(
        EngineConfig(model=checkpoint, **engine),
        model_id="tiny",
        alias=alias,
        keep_alive_s=keep_alive_s,
        stall_timeout=stall_timeout,
        no_warmup_next_turn=no_warmup_next_turn,
        **(server or {}),
    )

    def watched(config: EngineConfig) -> Engine:
        service.engines.append(WatchedEngine(config, sampler=sampler, gate=gate))
        return service.engine

    app = make_app(config, open_engine=open_engine or watched, on_fault=on_fault, clock=clock)
    transport = InProcess(app)
    client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S)
    service = Served(app, transport, client, gate)
    async with client:
        service.count_submissions()
        if open_engine is None:
            await app.state.service.models.default.bridge.model()
        try:
            yield service
        finally:
            gate.open()
        await service.exchanges_ended()
        await asyncio.to_thread(settle, service.loop)
        for engine_ in service.engines:
            assert all(row.storage is None for row in engine_.rows), "an ended row holds storage"


@dataclass
class Live:
    """A server on a real socket, in a thread of this process."""

    config: ServerConfig
    address: str
    apps: list[Starlette]
    codes: list[int]
    _thread: threading.Thread
    _server: Any

    @property
    def loop(self) -> EngineLoop:
        loop: EngineLoop = self.apps[0].state.service.models.default.bridge._loop
        return loop

    @property
    def base_url(self) -> str:
        return "http://tiny" if self.config.is_unix_socket else self.address

    def client(self) -> httpx2.Client:
        uds = self.config.host if self.config.is_unix_socket else None
        transport = httpx2.HTTPTransport(uds=uds)
        return httpx2.Client(transport=transport, base_url=self.base_url, timeout=PATIENCE_S)

    def async_client(self) -> httpx2.AsyncClient:
        uds = self.config.host if self.config.is_unix_socket else None
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        transport = httpx2.AsyncHTTPTransport(uds=uds, limits=limits)
        return httpx2.AsyncClient(transport=transport, base_url=self.base_url, timeout=PATIENCE_S)

    def socket(self) -> socket.socket:
        """A plain connection to the server."""
        if self.config.is_unix_socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.config.host)
            return connection
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def stop(self) -> None:
        """Tell the server to stop, as an interrupt does."""
        self._server.should_exit = True

    def ended(self) -> int:
        """Wait for the server's end; its exit code."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"
        return self.codes[0]


@contextmanager
def live(
    checkpoint: Path,
    host: str = "127.0.0.1",
    *,
    open_engine: Callable[[EngineConfig], Engine] = WatchedEngine,
    server: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Iterator[Live]:
    """`server.run.serve` in a thread, on a free port or on the unix socket `host`."""
    engine_config = EngineConfig(model=checkpoint, **engine)
    config = ServerConfig(engine_config, model_id="tiny", host=host, port=0, **(server or {}))
    apps: list[Starlette] = []
    servers: list[Any] = []
    codes: list[int] = []
    addresses: list[str] = []
    ready = threading.Event()

    class Kept(run._Server):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            servers.append(self)

    def kept_app(config: ServerConfig, **options: Any) -> Starlette:
        apps.append(make_app(config, open_engine=open_engine, **options))
        return apps[0]

    def told(address: str) -> None:
        addresses.append(address)
        ready.set()

    thread = threading.Thread(target=lambda: codes.append(run.serve(config, told)))
    with patch.object(run, "_Server", Kept), patch.object(run, "make_app", kept_app):
        thread.start()
        assert ready.wait(PATIENCE_S), "the server did not come up"
    try:
        yield Live(config, addresses[0], apps, codes, thread, servers[0])
        if thread.is_alive():
            settle(apps[0].state.service.models.default.bridge._loop)
    finally:
        servers[0].should_exit = True
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not end"
