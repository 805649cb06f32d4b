"""The course of a request over nodes: who runs it, and who goes on when that one is gone.

A prefill node computes the prompt and draws the first token, a decode node fetches what is stored and goes on. A
node that is gone costs time and no token: the request is computed again elsewhere, behind the tokens that its
client has, and since a draw depends on seed, index and logits alone it goes on with the same ones. With no node of
one pool left, those of the other do both.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import count

from engine.errors import EngineFault, EngineStopped, MlxcelError, QueueFull
from engine.request import PRIORITIES, Event, Request
from server.errors import NoNode
from server.roles import wire
from server.roles.balance import Candidate, Prefixes, choose
from server.roles.job import Job
from server.roles.peer import NodeLost, Peer, Role

log = logging.getLogger(__name__)

MAX_LOST = 8  # nodes that one request may lose
NODE_WAIT_S = 20.0  # how long a request waits while there is no node at all
FULL_WAIT_S = 0.05  # until nodes that had no room are asked again
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class NodeFull(EngineFault):
    """The node has as many requests as it may, of whoever: it is asked again."""


class Course:
    """Runs jobs over `peers`; what happens to one is told to `deliver`."""

    def __init__(
        self,
        peers: Sequence[Peer],
        deliver: Callable[[Job, Event | MlxcelError], None],
        clock: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._deliver = deliver
        self._clock = clock
        self._prefixes: dict[Role, Prefixes] = {"prefill": Prefixes(), "decode": Prefixes()}
        self._numbers = count()
        self._choices = count(1)
        self._waiting: dict[Role, list[tuple[int, int]]] = {"prefill": [], "decode": []}
        self._woken = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a node to have room."""
        return sum(map(len, self._waiting.values()))

    def begin(self, job: Job) -> None:
        """Run `job` to its end."""
        self.counts["requests"] += 1
        job.task = asyncio.get_running_loop().create_task(self._run(job))

    def leave(self, job: Job) -> None:
        """End `job` wherever it runs."""
        if job.task is not None:
            job.task.cancel()

    def expect(self, request: Request) -> None:
        """Have the node that has most of this prompt store the rest."""
        held = self._prefixes["prefill"].held(_owner(request), request.prompt)
        peers = {peer.name: peer for peer in self._peers if peer.takes and peer.role == "prefill"}
        if peer := peers.get(max(held, key=held.__getitem__, default="")):
            peer.say(wire.Expect(request))

    def changed(self, peer: Peer) -> None:
        """A node has come or gone."""
        if not peer.is_up:
            self._prefixes[peer.role].forget(peer.name)
        self.wake()

    def wake(self) -> None:
        """Let those that wait look again."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    async def _run(self, job: Job) -> None:
        try:
            while not await self._attempt(job):
                self._lost(job)
        except MlxcelError as error:
            self._deliver(job, error)
        except Exception as fault:
            log.exception("request %s could not be routed", job.request.id)
            self._deliver(job, EngineStopped(f"the request could not be routed: {fault}"))
        finally:
            self.wake()

    def _lost(self, job: Job) -> None:
        """One more node is gone that ran the job. Raises EngineStopped where it has lost too many."""
        job.num_lost += 1
        self.counts["rerouted"] += 1
        if job.num_lost > MAX_LOST:
            raise EngineStopped(f"{job.num_lost} nodes were lost over this request")

    async def _attempt(self, job: Job) -> bool:
        """Run the job from where its client is; False: the node that ran it is gone. Raises what made it fail."""
        first = await self._node(job, "prefill")
        over = first.role == "prefill" and any(peer.role == "decode" and peer.takes for peer in self._peers)
        number = next(self._numbers)
        try:
            try:
                handed = await self._follow(job, first, job.start(number, self._clock(), hands_over=over))
            except NodeFull:
                await asyncio.sleep(FULL_WAIT_S)
                return await self._attempt(job)
            if handed is None:
                return True
            job.handed(handed)
            self.counts["handed_over"] += 1
            await self._go_on(job, first, number, handed)
            return True
        except NodeLost as lost:
            log.warning("request %s is computed again: %s", job.request.id, lost)
            return False
        finally:
            first.say(wire.Cancel(number))  # also what it has left to be fetched

    async def _go_on(self, job: Job, first: Peer, number: int, handed: wire.HandedOver) -> None:
        """Run the job at a decode node from what `first` has left of its `number`. Raises NodeLost."""
        num_before = len(job.row.output)
        while True:
            second = await self._node(job, "decode")
            fetch = wire.Fetch(first.address, handed.handle, handed.state) if second is not first else None
            if fetch is None:
                first.say(wire.Cancel(number))  # the slot that it has left may be the one that it is to have
            start = job.start(next(self._numbers), self._clock(), hands_over=False, fetch=fetch)
            try:
                await self._follow(job, second, start)
            except NodeFull:
                await asyncio.sleep(FULL_WAIT_S)
                continue
            except NodeLost:
                if len(job.row.output) > num_before or not first.is_up:
                    raise
                self._lost(job)
                continue
            self._prefixes["decode"].sent(_owner(job.request), job.tokens, second.name)
            return

    async def _follow(self, job: Job, peer: Peer, start: wire.Start) -> wire.HandedOver | None:
        """Have `peer` run the job and pass on what comes of it, to its end, or until it hands it over.

        Raises NodeLost, and what made it fail.
        """
        inbox = peer.open(start.number)
        peer.say(start)
        try:
            while True:
                message = await inbox.get()
                match message:
                    case NodeLost():
                        raise message
                    case wire.Stored():
                        if not job.row.output:
                            self._deliver(job, job.progress(message))
                    case wire.Said():
                        if len(job.row.output) >= job.row.limit_tokens:
                            raise NodeLost(f"{peer.name} gives more tokens than were asked for")
                        self._deliver(job, job.output(message, self._clock()))
                        if message.finish_reason is not None:
                            return None
                    case wire.HandedOver():
                        if not start.request.hands_over:
                            raise NodeLost(f"{peer.name} hands over what it was to end")
                        return message
                    case wire.Ended():
                        raise self._ended(peer, message.error)
        except asyncio.CancelledError:
            peer.say(wire.Cancel(start.number))
            raise
        finally:
            peer.shut(start.number)
            self.wake()

    @staticmethod
    def _ended(peer: Peer, error: MlxcelError) -> MlxcelError:
        """What it means that a node ends a request by `error`."""
        if isinstance(error, QueueFull):
            return NodeFull(f"{peer.name} is full")
        return NodeLost(f"{peer.name} gives it up: {error}") if isinstance(error, EngineStopped) else error

    async def _node(self, job: Job, role: Role) -> Peer:
        """A node for the job's next part, as soon as one has room. Raises NoNode."""
        turn = PRIORITIES.index(job.request.priority), job.number
        line = self._waiting[role]
        line.append(turn)
        since_s = self._clock()
        try:
            while True:
                if turn == min(line) and (peer := self._chosen(job, role)) is not None:
                    return peer
                if any(peer.is_up for peer in self._peers):
                    since_s = self._clock()
                elif self._clock() - since_s > NODE_WAIT_S:
                    raise NoNode(f"for {NODE_WAIT_S:.0f} s none of the nodes was up")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FULL_WAIT_S):  # wait_for may lose a cancel before Python 3.12
                        await self._woken.wait()
        finally:
            line.remove(turn)
            self.wake()

    def _chosen(self, job: Job, role: Role) -> Peer | None:
        """The node that the job goes to now, if one has room."""
        pools = [[peer for peer in self._peers if peer.takes and peer.role == one] for one in (role, OTHER[role])]
        pool = pools[0] or pools[1]
        tokens = job.tokens
        held = self._prefixes[role].held(_owner(job.request), tokens) if pools[0] else {}
        candidates = [
            Candidate(peer.name, peer.load, peer.welcome.capacity, peer.chosen_at) for peer in pool if peer.welcome
        ]
        chosen = choose(candidates, held)
        if chosen is None:
            return None
        peer = next(peer for peer in pool if peer.name == chosen.name)
        peer.chosen_at = next(self._choices)
        self.counts["decisions"] += 1
        if held.get(peer.name):
            self.hits[role] += 1
        if role == "prefill":
            self._prefixes[peer.role].sent(_owner(job.request), tokens, peer.name)
        return peer

    async def close(self) -> None:
        """Nothing is to be followed any more; whoever runs was left before."""
        self.wake()
        await asyncio.sleep(0)


def _owner(request: Request) -> Hashable:
    """Whose prefixes a request may share."""
    return request.cache_salt if request.cache_prompt else (request.id, request.choice)
