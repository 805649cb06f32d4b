"""The inputs of one request for embeddings under way, and the vectors that they have come to.

They are fed into the loop a few at a time, so that many of them leave the queue to others. One of them is always
in it, however full it is: what was begun is not refused. Knows no HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import MlxcelError, QueueFull
from engine.loop import Ticket
from engine.request import Embedded, Event, Failed, Request
from server.bridge import Bridge
from server.generate import Usage

ROUNDS = 2  # of as many inputs as run at once: those that run, and those that follow them at once


class Vectors:
    """`num_slots` is how many of them can run at once; `usage` grows as an answer's does."""

    def __init__(self, bridge: Bridge, requests: Sequence[Request], num_slots: int) -> None:
        self.usage = Usage(sum(len(request.prompt) for request in requests))
        self._bridge = bridge
        self._requests = requests
        self._most = ROUNDS * num_slots
        self._next = 0
        self._running: dict[int, Ticket] = {}
        self._found: dict[int, tuple[float, ...]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Enqueue the first of them. Raises QueueFull where there is no place for one, and EngineStopped."""
        while self._next < len(self._requests) and len(self._running) < self._most:
            goes_on = bool(self._next) and not self._running
            try:
                ticket = self._bridge.enqueue(
                    self._requests[self._next], self._hear(self._next), is_accepted=goes_on
                )
            except QueueFull:
                if not self._running:
                    raise
                return
            self._running[self._next] = ticket
            self._next += 1

    async def whole(self) -> list[tuple[float, ...]]:
        """The vectors in the order of the inputs. Raises what made one fail."""
        await self._ended
        self.usage.reasons.append("stop")
        return [self._found[place] for place in range(len(self._requests))]

    def fail(self, error: MlxcelError) -> None:
        """Cancel what still runs, and raise `error` where `whole` waits."""
        self.close()
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # so that asyncio does not complain where the client has left

    def close(self) -> None:
        """Cancel every input that has no vector yet; harmless when repeated."""
        running, self._running = self._running, {}
        self._next = len(self._requests)
        for ticket in running.values():
            self._bridge.cancel(ticket)

    def _hear(self, place: int) -> Callable[[Event | MlxcelError], None]:
        def hear(event: Event | MlxcelError) -> None:
            if place not in self._running:
                return
            match event:
                case Embedded():
                    self._take(place, event.vector)
                case Failed():
                    self.fail(event.error)
                case MlxcelError():
                    self.fail(event)

        return hear

    def _take(self, place: int, vector: tuple[float, ...]) -> None:
        del self._running[place]
        self._found[place] = vector
        try:
            self.begin()
        except MlxcelError as error:
            self.fail(error)
        if len(self._found) == len(self._requests):
            self._ended.set_result(None)
