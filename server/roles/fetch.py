"""Fetches rows' states from the nodes that have them, piece by piece, and no more at once than there is room for.

Whoever fetches asks for each piece, so a state is never sent faster than it is taken. What cannot be had is no
fault: the row is computed again.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from engine.errors import UserError
from engine.handover import Arriving
from server.roles import wire
from server.roles.counts import Counts
from server.roles.sockets import Sockets, unheard

log = logging.getLogger(__name__)

WINDOW = 4  # pieces on their way at once
PATIENCE_S = 10.0  # for the next piece
Taken = tuple[int, Sequence[memoryview]] | None  # where a piece begins, and its bytes; None: there is no more


class _Source:
    """The connection to one node, and the states that are on their way over it, by their handles."""

    def __init__(self, sockets: Sockets, address: str, name: bytes, counts: Counts) -> None:
        self._socket = sockets.connect(address, name, on_lost=self._lost)
        self._counts = counts
        self.waiting: dict[str, asyncio.Queue[Taken]] = {}
        self.task = asyncio.get_running_loop().create_task(self._receive())

    def say(self, message: wire.Message) -> None:
        unheard(self._socket.send_multipart([wire.encoded(message)]))

    def _lost(self) -> None:
        for queue in self.waiting.values():
            queue.put_nowait(None)

    async def _receive(self) -> None:
        while True:
            frames: list[Any] = await self._socket.recv_multipart(copy=False)
            try:
                said = wire.for_fetcher(frames[0].buffer)
            except wire.Refused as why:
                self._counts.refused["message"] += 1
                log.warning("what a node said is not taken: %s", why)
                continue
            if queue := self.waiting.get(said.handle):
                found = (
                    (said.start, [frame.buffer for frame in frames[1:]]) if isinstance(said, wire.Piece) else None
                )
                queue.put_nowait(found)


class Fetcher:
    """Serves one node. States that have come and are not yet in the engine take `most_bytes` at most together, or
    one of them what it takes.
    """

    def __init__(self, sockets: Sockets, name: bytes, most_bytes: int, counts: Counts) -> None:
        self._sockets = sockets
        self._name = name
        self._most_bytes = most_bytes
        self._counts = counts
        self._held_bytes = 0
        self._changed = asyncio.Condition()
        self._sources: dict[str, _Source] = {}

    async def fetch(self, fetch: wire.Fetch) -> Arriving | None:
        """The state, or None: it cannot be had. What it takes here is counted until `settled` is called for it."""
        num_bytes = fetch.state.num_bytes
        async with self._changed:
            await self._changed.wait_for(lambda: not self._held_bytes or self._fits(num_bytes))
            self._held_bytes += num_bytes
        try:
            data = await self._pulled(fetch, num_bytes)
        except BaseException:
            await self.settled(num_bytes)
            raise
        if data is None:
            await self.settled(num_bytes)
            return None
        self._counts.state_bytes["fetched"] += num_bytes
        return Arriving(fetch.state, data)

    async def settled(self, num_bytes: int) -> None:
        """A state has gone into the engine, or is not needed."""
        async with self._changed:
            self._held_bytes -= num_bytes
            self._changed.notify_all()

    def leave(self, fetch: wire.Fetch) -> None:
        """Tell the node that has it that a state is not needed any more."""
        if source := self._source(fetch.address):
            source.say(wire.Fetched(fetch.handle))

    def close(self) -> None:
        for source in self._sources.values():
            source.task.cancel()

    def _fits(self, num_bytes: int) -> bool:
        return self._held_bytes + num_bytes <= self._most_bytes

    def _source(self, address: str) -> _Source | None:
        if address not in self._sources:
            try:
                self._sources[address] = _Source(self._sockets, address, self._name, self._counts)
            except (UserError, ValueError) as why:
                self._counts.refused["address"] += 1
                log.warning("a state cannot be fetched: %s", why)
                return None
        return self._sources[address]

    async def _pulled(self, fetch: wire.Fetch, num_bytes: int) -> bytearray | None:
        source = self._source(fetch.address)
        if source is None or fetch.handle in source.waiting:
            return None
        queue = source.waiting[fetch.handle] = asyncio.Queue()
        data, asked_for, next_start = bytearray(num_bytes), set[int](), 0
        try:
            while asked_for or next_start < num_bytes:
                while len(asked_for) < WINDOW and next_start < num_bytes:
                    stop = min(next_start + wire.PART_BYTES, num_bytes)
                    source.say(wire.Pull(fetch.handle, next_start, stop))
                    asked_for.add(next_start)
                    next_start = stop
                async with asyncio.timeout(PATIENCE_S):
                    taken = await queue.get()
                if taken is None or taken[0] not in asked_for or not _put(data, *taken):
                    return None
                asked_for.discard(taken[0])
        except TimeoutError:
            log.warning("the node at %s does not send a state", fetch.address)
            return None
        finally:
            del source.waiting[fetch.handle]
        return data


def _put(data: bytearray, start: int, parts: Sequence[memoryview]) -> bool:
    """Put a piece where it belongs; False if it is not as long as it was to be."""
    if sum(part.nbytes for part in parts) != min(wire.PART_BYTES, len(data) - start):
        return False
    for part in parts:
        data[start : start + part.nbytes] = part
        start += part.nbytes
    return True
