"""The router: it stands where an engine's loop stands, and has nodes run what it is given.

It knows no weights: a tokenizer, a template, and what its nodes say of themselves. Who runs a request, and what
becomes of it when a node is gone, is `course.py`'s business.
"""

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import EngineStopped, MlxcelError, QueueFull
from engine.handover import Arriving, Identity
from engine.loop import Ticket
from engine.metrics import Metrics, Numbers, Outcome
from engine.plan import Tick
from engine.request import Event, Failed, Output, Request, Row
from engine.served import ServedModel, Slot
from engine.watch import Watch
from server.errors import NO_NODE, NoNode, NotSupported
from server.roles import wire
from server.roles.counts import Counts
from server.roles.course import Course
from server.roles.job import Job
from server.roles.keys import Keys
from server.roles.peer import Peer, Role
from server.roles.sockets import Sockets
from server.roles.worker import vocabulary_of

if TYPE_CHECKING:
    from engine.model.spoken import Spoken

log = logging.getLogger(__name__)

SEED_MASK = (1 << 64) - 1
WAIT_S = 20.0  # for the first nodes, where a request has come already
ROLES: tuple[Role, Role] = ("prefill", "decode")


def read_spoken(config: EngineConfig) -> "Spoken":
    """The tokenizer's side of the model. Raises ModelError."""
    from engine.loop import limits_kept

    with limits_kept():
        from engine.model.spoken import read
    return read(config)


class Router:
    """Takes an `EngineLoop`'s place behind the bridge; all of it runs on the bridge's event loop.

    `prefill` and `decode` are the addresses of its nodes.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        keys: Keys | None,
        on_state: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.watch = Watch()
        self.model: ServedModel | None = None
        self.fault: MlxcelError | None = None
        self.peers: list[Peer] = []
        self._addresses: dict[Role, Sequence[str]] = {"prefill": prefill, "decode": decode}
        self._sockets = Sockets(keys)
        self.counts = Counts(self._sockets.refused)
        self._on_state = on_state
        self._clock = clock
        self._name = f"router {secrets.token_hex(8)}".encode()
        self._numbers = count()
        self._jobs: dict[Ticket, Job] = {}
        self.course = Course(self.peers, self._deliver, clock)
        self._spoken: Spoken | None = None
        self._vocabularies: dict[int, str] = {}
        self._identity: Identity | None = None
        self._progress_s = 0.0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def capacity(self) -> int:
        """How many requests may run and wait at once."""
        return self.num_slots + self.config.max_queue_depth

    @property
    def takes(self) -> bool:
        """Whether there is a node that may be given something."""
        return any(peer.takes for peer in self.peers)

    @property
    def num_slots(self) -> int:
        """How many rows its nodes run at once: those that go on, as long as there are any."""
        slots = {role: sum(peer.num_slots for peer in self.peers if peer.role == role) for role in ROLES}
        return slots["decode"] or slots["prefill"]

    async def waited(self, come: Awaitable[Any]) -> None:
        """Wait for the first nodes, but not for ever. Raises NoNode."""
        try:
            async with asyncio.timeout(WAIT_S):
                await come
        except TimeoutError:
            missing = [role for role in ROLES if self._addresses[role] and not self._has(role)]
            raise NoNode(f"for {WAIT_S:.0f} s no node was there to {' and none to '.join(missing)}") from None

    def _has(self, role: Role) -> bool:
        return any(peer.takes and peer.role == role for peer in self.peers)

    def start(self) -> None:
        """Begin to look for the nodes; called on the event loop. `on_state` hears of `model` and `fault`."""
        self._loop = asyncio.get_running_loop()
        self._sockets.start()
        self._starting = self._loop.create_task(self._open())

    def stop(self, timeout_s: float | None = None) -> None:
        """End all requests; from another thread, and without a `timeout_s` of 0, close everything too."""
        self._stopping = True
        assert self._loop is not None, "the router was started"
        if timeout_s == 0:
            self._end_all(EngineStopped("the server is stopping"))
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout_s)

    async def _open(self) -> None:
        try:
            self._spoken = await asyncio.to_thread(read_spoken, self.config)
            for role in ROLES:
                for number, address in enumerate(self._addresses[role]):
                    self.peers.append(
                        Peer(
                            role,
                            number,
                            address,
                            sockets=self._sockets,
                            router=self._name,
                            counts=self.counts,
                            unfit=self._unfit,
                            on_change=self._changed,
                        )
                    )
        except MlxcelError as fault:
            self.fault = fault
            self._on_state()

    async def _close(self) -> None:
        self._end_all(EngineStopped("the server is stopping"))
        if self._starting is not None:
            self._starting.cancel()
        await self.course.close()
        for peer in self.peers:
            await peer.close()
        await self._sockets.close()

    def submit(
        self,
        request: Request,
        deliver: Callable[[Event | MlxcelError], None],
        arriving: Arriving | None = None,
        *,
        is_accepted: bool = False,
    ) -> Ticket:
        """Have `request` run. Raises QueueFull, NoNode or EngineStopped at once; later errors are delivered."""
        assert arriving is None, "states go from node to node"
        if self._stopping or self.fault is not None:
            raise self.fault or EngineStopped("the router is stopping")
        if not self.takes:
            self.metrics.refused()
            raise NoNode(NO_NODE)
        if len(self._jobs) >= self.capacity and not is_accepted:
            self.metrics.refused()
            raise QueueFull(f"{len(self._jobs)} requests run or wait already, and no more may")
        now_s = self._clock()
        if not self._jobs:
            self._progress_s = now_s
        row, number = self._row(request), next(self._numbers)
        ticket = Ticket(request, deliver, number, now_s)
        job = Job(ticket, row, number)
        ticket.row = job.row
        self._jobs[ticket] = job
        self.watch.queued(ticket, now_s)
        self.metrics.started([ticket.times], now_s)
        self.watch.started([ticket], now_s)
        self.course.begin(job)
        return ticket

    def _row(self, request: Request) -> Row:
        """What stands for the request here: its seed and its bounds are the same at whatever node it runs."""
        sampling = request.sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & SEED_MASK
        most, bound = request.max_tokens, self.config.n_predict
        if most is None and bound >= 0:
            most = bound
        sampling = dataclasses.replace(sampling, seed=seed)
        request = wire.within_bounds(dataclasses.replace(request, sampling=sampling, max_tokens=most))
        assert self.model is not None, "requests come when the model is known"
        left = self.model.context_length - len(request.prompt)
        return Row(request, left if most is None else min(left, most), seed, None)

    def cancel(self, ticket: Ticket) -> None:
        """End the request wherever it runs; it gets no more events. Harmless when it has ended."""
        if job := self._jobs.get(ticket):
            self._end(job, "cancelled")
            self.course.leave(job)

    def ask(self, question: Callable[[Any], Any], deliver: Callable[[Any], None]) -> None:
        """A router has no engine to be asked."""
        deliver(NotSupported("a router keeps nothing itself; ask its nodes"))

    def warm_up(self, request: Request) -> None:
        """Have the node that has the most of this prompt store the rest."""
        self.course.expect(request)

    def numbers(self) -> Numbers:
        numbers = self.metrics.read()
        numbers.at_s = self._clock()
        numbers.active_rows = min(len(self._jobs), self.num_slots)
        numbers.queue_depth = len(self._jobs) - numbers.active_rows
        return numbers

    def slots(self) -> list[Slot | None]:
        """What runs, as far as there are slots for it."""
        running: list[Slot | None] = [self._slot(job) for job in self._jobs.values()]
        return [*running, *[None] * self.num_slots][: self.num_slots]

    @staticmethod
    def _slot(job: Job) -> Slot:
        decoded, row = len(job.row.output), job.row
        stored = len(row.request.prompt) if decoded else job.stored_tokens
        return Slot(job.number, row.request, stored, job.num_cached, decoded, row.limit_tokens - decoded)

    def silent_s(self) -> float:
        """How long requests have run without a token or a stored piece; 0 when there are none."""
        return self._clock() - self._progress_s if self._jobs else 0.0

    def drain(self, name: str, *, drains: bool) -> bool:
        """Give the node `name` nothing new, or do so again; False: there is none. What runs there runs on."""
        for peer in self.peers:
            if peer.name == name:
                peer.drains = drains
                self.course.wake()
                return True
        return False

    def _unfit(self, peer: Peer, welcome: wire.Welcome) -> str | None:
        """Why a node that says this of itself cannot be used, or None."""
        assert self._spoken is not None, "the tokenizer is read before nodes are looked for"
        if welcome.role != peer.role:
            return f"it is a {welcome.role} node, and here it is listed among those that {peer.role}"
        size = welcome.vocab_size
        if size not in self._vocabularies:
            self._vocabularies[size] = vocabulary_of(self._spoken.language(size).tokens)
        if welcome.vocabulary != self._vocabularies[size]:
            return "its tokenizer is another one than the router's"
        if self._identity is not None and (unlike := self._identity.unlike(welcome.identity)):
            return unlike
        if self.model is not None and welcome.context_length < self.model.context_length:
            return f"its context of {welcome.context_length} tokens is less than {self.model.context_length}"
        self._identity = self._identity or welcome.identity
        return None

    def _changed(self, peer: Peer) -> None:
        """A node has come or gone."""
        self.course.changed(peer)
        there = {
            role: [p.welcome for p in self.peers if p.role == role and p.takes and p.welcome] for role in ROLES
        }
        if self.model is None and all(there[role] or not self._addresses[role] for role in ROLES):
            self.model = self._known([welcome for role in ROLES for welcome in there[role]])
            self._on_state()

    def _known(self, nodes: Sequence[wire.Welcome]) -> ServedModel:
        """The model as its nodes have it: what each of them can do."""
        assert self._spoken is not None, "the tokenizer is read before nodes are looked for"
        most = min(node.most_prompt_tokens for node in nodes)
        least = min(nodes, key=lambda node: node.context_length)

        def lacks(num_tokens: int) -> str | None:
            return (
                None if num_tokens <= most else f"{num_tokens} tokens are more than the {most} that a node stores"
            )

        names = ", ".join(peer.name for peer in self.peers if peer.is_up)
        return ServedModel.speaking(
            self._spoken.language(least.vocab_size),
            context_length=least.context_length,
            default_sampling=self.config.default_sampling(self._spoken.sampling),
            num_slots=self.num_slots,
            notes=(f"router: {names}",),
            storable=least.storable,
            lacks=lacks,
            cuts_at_turns=least.cuts_at_turns,
            storage_backend=least.storage_backend,
        )

    def _deliver(self, job: Job, event: Event | MlxcelError) -> None:
        """Something has happened to a request; what comes after its end is for nobody."""
        if job.ticket not in self._jobs:
            return
        now_s = self._clock()
        outcome: Outcome | None = None
        if isinstance(event, (MlxcelError, Failed)):
            outcome = "failed"
        else:
            self._progress_s = now_s
            self.watch.ran([(job.ticket, event)], (), now_s)
            self.metrics.ran(Tick(), [(job.ticket.times, event)], now_s)
            outcome = event.finish_reason if isinstance(event, Output) else None
        if outcome is not None:
            self._end(job, outcome)
        try:
            job.ticket.deliver(event)
        except Exception:
            log.exception("the consumer of request %s failed", job.request.id)
            self.cancel(job.ticket)

    def _end(self, job: Job, outcome: Outcome) -> None:
        del self._jobs[job.ticket]
        job.ticket.ended = True
        now_s = self._clock()
        self.metrics.ended(outcome, job.ticket.times, now_s)
        self.watch.ended(job.ticket, outcome, now_s)

    def _end_all(self, error: MlxcelError) -> None:
        for job in list(self._jobs.values()):
            self._deliver(job, error)
            self.course.leave(job)

    def stats(self, *, addresses: bool) -> dict[str, Any]:
        """What `/router/stats` tells; `addresses` of nodes are for whoever asks from this machine."""
        numbers = self.metrics.read()
        return {
            "metrics": {
                "total_requests": self.course.counts["requests"],
                "total_completed": numbers.requests["stop"] + numbers.requests["length"],
                "total_failed": numbers.requests["failed"],
                "total_cancelled": numbers.requests["cancelled"],
                "rejected_requests": numbers.requests["refused"],
                "active_requests": len(self._jobs),
                "queue_depth": self.course.num_waiting,
                "routing_decisions": self.course.counts["decisions"],
                "handed_over": self.course.counts["handed_over"],
                "failure_events": sum(peer.num_lost for peer in self.peers),
                "rerouted_requests": self.course.counts["rerouted"],
            },
            "prefill_hits": self.course.hits["prefill"],
            "decode_hits": self.course.hits["decode"],
            "refused": dict(self.counts.refused),
            "nodes": [self._node(peer, addresses=addresses) for peer in self.peers],
            "addresses_redacted": not addresses,
        }

    @staticmethod
    def _node(peer: Peer, *, addresses: bool) -> dict[str, Any]:
        pong = peer.pong
        return {
            "id": peer.name,
            "role": peer.role,
            "status": peer.status,
            **({"address": peer.address} if addresses else {}),
            "running": peer.num_running,
            "sent": peer.num_sent,
            "lost": peer.num_lost,
            "slots": peer.num_slots,
            "active": pong.active if pong else 0,
            "waiting": pong.waiting if pong else 0,
            "silent_s": round(pong.silent_s, 3) if pong else 0.0,
        }
