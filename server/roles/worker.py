"""A node that runs requests for routers: those that compute prompts, and those that go on from them, alike.

What a request needs is in its `Start`; a row that hands over waits here until its state was fetched, in its slot
and with its memory, so that no more prompts are computed than states are taken. Whoever is silent for too long has
its requests ended.
"""

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from engine.errors import EngineStopped, MlxcelError, NoEmbeddings, QueueFull, StepFailed
from engine.handover import Arriving, Departing
from engine.loop import Ticket
from engine.request import Embedded, Event, Failed, Handed, Output, Progress
from engine.served import ServedModel
from engine.text.tokens import Tokens
from server.bridge import Bridge
from server.roles import wire
from server.roles.counts import Counts
from server.roles.fetch import Fetcher
from server.roles.sockets import Sockets, unheard

log = logging.getLogger(__name__)

SILENT_S = 5.0  # after which a router is taken to be gone
LEASE_S = 60.0  # how long a state waits to be fetched
SENT_S = 0.005  # between two looks at whether bytes have left
MOST_ARRIVING_BYTES = 1 << 30


@dataclass(eq=False, slots=True)
class _Job:
    """One request of one router: where it is, and what of its state is on its way out."""

    router: bytes
    number: int
    ticket: Ticket | None = None
    task: asyncio.Task[None] | None = None
    handle: str = ""
    departing: Departing | None = None
    lease: asyncio.TimerHandle | None = None
    sent: list[zmq.MessageTracker] = field(default_factory=list)
    landed: Callable[[], None] = lambda: None


class Worker:
    """Serves routers over `sockets`, at `address`. `keeps`: the engine has a prompt cache."""

    def __init__(self, bridge: Bridge, sockets: Sockets, address: str, role: str, *, keeps: bool) -> None:
        self._bridge = bridge
        self._keeps = keeps
        self._sockets = sockets
        self._role = role
        self._boot = secrets.token_hex(8)
        self._socket, self.address = sockets.listen(address)
        self.counts = Counts(sockets.refused)
        self._fetcher = Fetcher(sockets, f"node {self._boot}".encode(), MOST_ARRIVING_BYTES, self.counts)
        self._welcome: wire.Welcome | None = None
        self._jobs: dict[tuple[bytes, int], _Job] = {}
        self._leaving: dict[str, _Job] = {}  # by the handles of their states
        self._heard_s: dict[bytes, float] = {}
        self._drains = False
        self._tasks: set[asyncio.Task[None]] = set()
        for work in (self._serve(), self._watch()):
            self._spawn(work)

    def drain(self) -> None:
        """Take nothing new; what runs here runs on."""
        self._drains = True

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Take nothing new, end what has not ended after `grace_s`: routers hear of it, and go on elsewhere."""
        self.drain()
        until_s = time.monotonic() + grace_s
        while self._jobs and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        for job in list(self._jobs.values()):
            self._say(job.router, wire.Ended.of(job.number, EngineStopped("the node is stopping")))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fetcher.close()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _say(self, to: bytes, message: wire.Message) -> None:
        if not self._socket.closed:
            unheard(self._socket.send_multipart([to, wire.encoded(message)]))

    async def _serve(self) -> None:
        try:
            model = await self._bridge.model()
            self._welcome = await self._described(model)
        except MlxcelError:
            return  # the application ends by it
        while True:
            frames: list[Any] = await self._socket.recv_multipart(copy=False)
            try:
                self._take(bytes(frames[0].buffer), [frame.buffer for frame in frames[1:]])
            except wire.Refused as why:
                self.counts.refused["message"] += 1
                log.warning("a message is not taken: %s", why)
            except Exception:
                self.counts.refused["fault"] += 1
                log.exception("a message could not be taken")

    async def _described(self, model: ServedModel) -> wire.Welcome:
        identity = await self._bridge.identity()
        vocabulary = await self._bridge.text_work(lambda: vocabulary_of(model.tokens))
        return wire.Welcome(
            boot=self._boot,
            role=self._role,
            identity=identity,
            vocabulary=vocabulary,
            vocab_size=model.tokens.vocab_size,
            context_length=model.context_length,
            num_slots=model.num_slots,
            capacity=self._bridge.capacity,
            most_prompt_tokens=most_tokens(model),
            storable=model.storable,
            cuts_at_turns=model.cuts_at_turns,
            storage_backend=model.storage_backend,
        )

    def _take(self, router: bytes, frames: list[memoryview]) -> None:
        """Do what one message says. Raises Refused."""
        if len(frames) != 1:
            raise wire.Refused(f"{len(frames)} frames")
        assert self._welcome is not None, "nothing is taken before the model is there"
        message = wire.for_node(frames[0])
        if not isinstance(message, (wire.Pull, wire.Fetched)):  # those come from nodes, which do not ping
            self._heard_s[router] = time.monotonic()
        match message:
            case wire.Hello():  # whatever the router had here, it follows no longer
                for job in [job for job in self._jobs.values() if job.router == router]:
                    self._end(job)
                self._say(router, self._welcome)
            case wire.Ping():
                self._say(router, self._pong())
            case wire.Start():
                try:
                    self._start(router, message)
                except wire.Refused as why:
                    self._say(router, wire.Ended.of(message.number, StepFailed(f"the node refuses it: {why}")))
                    raise
            case wire.Expect():
                expected = wire.request_of(message.request, "", vocab_size=self._welcome.vocab_size)
                if self._keeps:
                    bare = dataclasses.replace(expected, resumed=None, grammar=None, hands_over=False)
                    self._bridge.warm_up(bare)
            case wire.Cancel():
                if there := self._jobs.get((router, message.number)):
                    self._end(there)
            case wire.Pull():
                self._send(router, message)
            case wire.Fetched():
                if left := self._leaving.get(message.handle):
                    self._end(left)

    def _pong(self) -> wire.Pong:
        active = sum(slot is not None for slot in self._bridge.slots())
        waiting = max(len(self._jobs) - active, 0)
        return wire.Pong(self._boot, active, waiting, self._bridge.silent_s(), self._drains)

    def _start(self, router: bytes, start: wire.Start) -> None:
        assert self._welcome is not None, "nothing is taken before the model is there"
        if (router, start.number) in self._jobs:
            raise wire.Refused("a request with the number of one that runs")
        request = wire.request_of(start.request, start.begun, vocab_size=self._welcome.vocab_size)
        if self._drains:
            self._say(router, wire.Ended.of(start.number, EngineStopped("the node takes nothing new")))
            return
        if len(self._jobs) >= self._bridge.capacity or self._bridge.is_full:  # before a state is fetched for it
            self._say(router, wire.Ended.of(start.number, QueueFull("as many requests wait as may")))
            return
        job = _Job(router, start.number)
        self._jobs[router, start.number] = job

        async def run() -> None:
            try:
                arriving = None if start.fetch is None else await self._fetched(job, start.fetch, start)
                job.ticket = self._bridge.enqueue(request, lambda event: self._heard(job, event), arriving)
            except MlxcelError as error:
                self._heard(job, error)
            except Exception as fault:
                log.exception("request %s could not be begun", request.id)
                self._heard(job, StepFailed(f"the request could not be begun: {fault}"))

        job.task = self._spawn(run())

    async def _fetched(self, job: _Job, fetch: wire.Fetch, start: wire.Start) -> Arriving | None:
        """The state that the request goes on from, or None: it is computed again."""
        assert self._welcome is not None, "nothing is taken before the model is there"
        output = start.request.resumed.output if start.request.resumed else ()
        unfit = fetch.state.unfit(
            self._welcome.identity,
            num_tokens=len(start.request.prompt) + len(output) - 1,
            most_bytes=self._welcome.storable.row_bytes,
        )
        if unfit:
            self.counts.refused["state"] += 1
            log.warning("request %s: its state does not fit: %s", start.request.id, unfit)
        try:
            arriving = None if unfit else await self._fetcher.fetch(fetch)
        finally:
            self._fetcher.leave(fetch)
        self.counts.states["recomputed" if arriving is None else "fetched"] += 1
        if arriving is not None:
            num_bytes = arriving.state.num_bytes
            job.landed = lambda: self._settle(job, num_bytes)
        return arriving

    def _settle(self, job: _Job, num_bytes: int) -> None:
        job.landed = lambda: None
        self._spawn(self._fetcher.settled(num_bytes))

    def _heard(self, job: _Job, event: Event | MlxcelError) -> None:
        """Tell the router what has happened to its request."""
        if self._jobs.get((job.router, job.number)) is not job:
            return
        job.landed()
        match event:
            case Progress():
                self._say(job.router, wire.Stored(job.number, event.done, event.total))
            case Output():
                self._say(job.router, wire.Said.of(job.number, event))
                if event.finish_reason is not None:
                    self._forget(job)
            case Handed():
                self._leave(job, event)
            case Embedded():
                self._say(job.router, wire.Ended.of(job.number, NoEmbeddings("a node gives a router no vectors")))
                self._forget(job)
            case Failed():
                self._say(job.router, wire.Ended.of(job.number, event.error))
                self._forget(job)
            case _:
                self._say(job.router, wire.Ended.of(job.number, event))
                self._forget(job)

    def _leave(self, job: _Job, event: Handed) -> None:
        """Have a row's state wait for whoever goes on from it."""
        row, job.departing, job.handle = event.row, event.departing, secrets.token_hex(16)
        self._leaving[job.handle] = job
        job.lease = asyncio.get_running_loop().call_later(LEASE_S, self._expire, job)
        self.counts.states["left"] += 1
        self._say(
            job.router,
            wire.HandedOver(
                job.number,
                job.handle,
                event.departing.state,
                row.num_cached,
                row.cache_miss,
                (row.first_token_s - row.started_s) * 1000,
            ),
        )

    def _expire(self, job: _Job) -> None:
        self.counts.states["expired"] += 1
        self._end(job)

    def _send(self, to: bytes, pull: wire.Pull) -> None:
        """Send a piece of a state, from where it lies."""
        job = self._leaving.get(pull.handle)
        if job is None or job.departing is None:
            self._say(to, wire.Gone(pull.handle))
            return
        if not 0 <= pull.start < pull.stop <= min(pull.start + wire.PART_BYTES, job.departing.state.num_bytes):
            raise wire.Refused("a piece that is none")
        parts = wire.cut(job.departing.buffers, pull.start, pull.stop)
        head = wire.encoded(wire.Piece(pull.handle, pull.start))
        sending: Any = self._socket.send_multipart([to, head, *parts], copy=False, track=True)
        self.counts.state_bytes["sent"] += pull.stop - pull.start

        def on_its_way(sent: Any) -> None:
            if not sent.cancelled() and sent.exception() is None:
                job.sent.append(sent.result())

        sending.add_done_callback(on_its_way)
        job.sent = [tracker for tracker in job.sent if not tracker.done]

    def _end(self, job: _Job) -> None:
        """End a request that nobody waits for, or give up what it has left."""
        self._forget(job)
        if job.task is not None:
            job.task.cancel()
        job.landed()
        if job.ticket is not None:
            self._spawn(self._give_up(job, job.ticket))

    async def _give_up(self, job: _Job, ticket: Ticket) -> None:
        """Free the row once none of its bytes is on its way any more."""
        while not all(tracker.done for tracker in job.sent):
            await asyncio.sleep(SENT_S)
        job.departing = None
        self._bridge.cancel(ticket)

    def _forget(self, job: _Job) -> None:
        self._jobs.pop((job.router, job.number), None)
        self._leaving.pop(job.handle, None)
        if job.lease is not None:
            job.lease.cancel()

    async def _watch(self) -> None:
        """End the requests of routers that are gone."""
        while True:
            await asyncio.sleep(SILENT_S / 10)
            since_s = time.monotonic() - SILENT_S
            for router in [router for router, heard_s in self._heard_s.items() if heard_s < since_s]:
                del self._heard_s[router]
                for job in [job for job in self._jobs.values() if job.router == router]:
                    log.warning("a router is gone, and its request %d is ended", job.number)
                    self._say(router, wire.Ended.of(job.number, EngineStopped("the router was silent")))
                    self._end(job)


def vocabulary_of(tokens: Tokens) -> str:
    """A digest of all tokens' bytes: a router's tokenizer has to be its nodes' own."""
    digest = hashlib.sha256()
    for token in range(tokens.vocab_size):
        digest.update(tokens.spell(token) + b"\0")
    return digest.hexdigest()[:16]


def most_tokens(model: ServedModel) -> int:
    """The longest prompt that could ever be stored."""
    if model.lacks(model.context_length) is None:
        return model.context_length
    low, high = 0, model.context_length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if model.lacks(middle) else (middle, high)
    return low
