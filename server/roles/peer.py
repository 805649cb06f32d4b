"""One node as a router sees it: whether it is there, what it is, and the messages of each request that it runs."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from engine.errors import EngineFault, EngineStopped
from server.roles import wire
from server.roles.counts import Counts
from server.roles.sockets import Sockets, unheard

log = logging.getLogger(__name__)

PING_S = 0.5
LOST_S = 10.0  # of silence, where the connection has not broken before
STALLED_S = 60.0  # without a token or a piece, though it has requests
Role = Literal["prefill", "decode"]
Inbox = asyncio.Queue["wire.ToRouter | NodeLost"]


class NodeLost(EngineFault):
    """The node that ran a request is gone, or takes nothing: somebody else has to."""


class Peer:
    """A node at `address`, of the pool `role`. `unfit` says why a node like this cannot be used, or None.

    `on_change` is called when it has come or gone.
    """

    def __init__(
        self,
        role: Role,
        number: int,
        address: str,
        *,
        sockets: Sockets,
        router: bytes,
        counts: Counts,
        unfit: Callable[["Peer", wire.Welcome], str | None],
        on_change: Callable[["Peer"], None],
    ) -> None:
        self.role: Role = role
        self.name = f"{role}-{number}"
        self.address = address
        self.welcome: wire.Welcome | None = None
        self.pong: wire.Pong | None = None
        self.refused = ""
        self.drains = False  # as the router was told
        self.chosen_at = 0
        self.num_sent = 0
        self.num_lost = 0
        self._counts = counts
        self._unfit = unfit
        self._on_change = on_change
        self._inboxes: dict[int, Inbox] = {}
        self._heard_s = 0.0
        self._socket = sockets.connect(
            address,
            router,
            on_lost=lambda: self._lose("its connection has broken"),
            on_refused=lambda: self._refuse("its keys and the router's do not fit"),
        )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._beat())]

    @property
    def is_up(self) -> bool:
        """Whether it is there and of use."""
        return self.welcome is not None

    @property
    def takes(self) -> bool:
        """Whether it may be given something new."""
        pong = self.pong
        return (
            self.is_up and not self.drains and pong is not None and not (pong.drains or pong.silent_s > STALLED_S)
        )

    @property
    def load(self) -> int:
        """How many requests it has: of this router, or of all."""
        known = 0 if self.pong is None else self.pong.active + self.pong.waiting
        return max(len(self._inboxes), known)

    @property
    def num_running(self) -> int:
        """How many requests of this router it has."""
        return len(self._inboxes)

    @property
    def num_slots(self) -> int:
        """How many rows it runs at once, if it is there."""
        return 0 if self.welcome is None else self.welcome.num_slots

    @property
    def status(self) -> str:
        """One word, or why it is refused."""
        if self.is_up:
            drains = self.drains or (self.pong is not None and self.pong.drains)
            return "draining" if drains else "up" if self.takes else "stalled" if self.pong else "coming"
        return f"refused: {self.refused}" if self.refused else "down"

    def open(self, number: int) -> Inbox:
        """Where what comes for the request `number` is put."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes[number] = inbox
        self.num_sent += 1
        return inbox

    def shut(self, number: int) -> None:
        """Nothing more is wanted of this request."""
        self._inboxes.pop(number, None)

    def say(self, message: wire.Message) -> None:
        """Send, if it is there."""
        if self.is_up:
            self._send(message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: wire.Message) -> Any:
        return unheard(self._socket.send_multipart([wire.encoded(message)]))

    def _refuse(self, why: str) -> None:
        """Note why it is of no use, once."""
        if why != self.refused:
            log.error("%s at %s cannot be used: %s", self.name, self.address, why)
        self.refused = why

    def _lose(self, why: str) -> None:
        if self.welcome is None:
            self.refused = ""
            return
        log.warning("%s at %s is gone: %s", self.name, self.address, why)
        self.welcome = self.pong = None
        self.num_lost += 1
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put_nowait(NodeLost(f"{self.name} is gone: {why}"))
        self._on_change(self)

    async def _beat(self) -> None:
        """Ask whether it is there, as long as this lives."""
        beat: Any = None
        while True:
            if self.is_up and time.monotonic() - self._heard_s > LOST_S:
                self._lose(f"nothing was heard for {LOST_S:.0f} s")
            if beat is None or beat.done():  # what cannot be sent waits for a connection
                beat = self._send(wire.Ping() if self.is_up else wire.Hello())
            await asyncio.sleep(PING_S)

    async def _receive(self) -> None:
        while True:
            frames: list[Any] = await self._socket.recv_multipart(copy=False)
            try:
                if len(frames) != 1:
                    raise wire.Refused(f"{len(frames)} frames")
                self._take(wire.for_router(frames[0].buffer))
            except wire.Refused as why:
                self._counts.refused["message"] += 1
                log.warning("what %s said is not taken: %s", self.name, why)
                self._lose("it says what no node says")
            except Exception:
                log.exception("what %s said could not be taken", self.name)
                self._lose("what it says could not be taken")

    def _take(self, message: wire.ToRouter) -> None:
        self._heard_s = time.monotonic()
        match message:
            case wire.Welcome():
                wire.check_welcome(message)
                self._meet(message)
            case wire.Pong():
                self._hear(message)
            case _:
                if isinstance(message, wire.Said) and self.welcome is not None:
                    wire.check_said(message, self.welcome.vocab_size)
                if isinstance(message, wire.Ended) and isinstance(message.error, EngineStopped):
                    self.pong = None  # it is about to go: whether it takes anything, it says when it is asked next
                if inbox := self._inboxes.get(message.number):
                    inbox.put_nowait(message)
                elif not isinstance(message, wire.Ended):
                    self.say(wire.Cancel(message.number))  # what nobody follows any more

    def _hear(self, pong: wire.Pong) -> None:
        """Note how it is."""
        if self.welcome is None:
            return
        if pong.boot != self.welcome.boot:
            self._lose("it has begun anew")
            return
        is_news, self.pong = not self.takes, pong
        if pong.silent_s > STALLED_S and self._inboxes:
            self._lose(f"for {pong.silent_s:.0f} s nothing has come of its requests")
        elif is_news and self.takes:
            self._on_change(self)

    def _meet(self, welcome: wire.Welcome) -> None:
        """Take it in, if it is of use here."""
        if self.welcome is not None:
            return
        unfit = self._unfit(self, welcome)
        if unfit is not None:
            self._refuse(unfit)
            return
        self.welcome, self.refused = welcome, ""
        log.info("%s at %s is there", self.name, self.address)
        self._send(wire.Ping())  # what it takes is known when it has answered
