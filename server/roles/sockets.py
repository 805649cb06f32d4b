"""ZeroMQ as nodes use it: what is bounded, what is encrypted, who may connect, and what is heard of connections.

With keys every connection is CURVE, both ways; without, it is plain and stays on this machine.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from engine.errors import ConfigError, UserError
from server.address import is_local, split_address
from server.roles.keys import Keys
from server.roles.wire import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

MAX_WAITING = 16  # messages that one connection may have waiting here before its sender has to wait
HEARTBEAT_MS, SILENT_MS, HANDSHAKE_MS = 2_000, 10_000, 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000
FAILED_HANDSHAKES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


def unheard(sending: Any) -> Any:
    """Of what cannot be sent any more nobody has to hear: who waited for it is told otherwise."""

    def end(sent: Any) -> None:
        if not sent.cancelled():
            sent.exception()

    sending.add_done_callback(end)
    return sending


class Sockets:
    """The sockets of one process. `refused` counts what was not let in, by its kind."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._door: AsyncioAuthenticator | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()

    def start(self) -> None:
        """Called on the event loop that uses them."""
        if self._keys is not None:
            self._door = AsyncioAuthenticator(self._context)
            self._door.start()
            self._door.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of `key` may connect; asked by ZeroMQ for each connection."""
        assert self._keys is not None, "without keys nobody asks"
        if key in self._keys.allowed:
            return True
        self.refused["key"] += 1
        log.warning("a peer with an unknown key was turned away")
        return False

    def listen(self, address: str) -> tuple[zmq.asyncio.Socket, str]:
        """A socket that others connect to, and its address. Raises ConfigError."""
        if self._keys is None and not is_local(address):
            raise ConfigError("serving_bind", f"{address} is beyond this machine, and there are no keys")
        socket = self._context.socket(zmq.ROUTER)
        self._bound(socket)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys.own.public, self._keys.own.secret
        host, port = split_address(address)
        socket.set(zmq.IPV6, int(":" in host))
        shown = f"[{host}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{'127.0.0.1' if host == 'localhost' else shown}:{port or '*'}")
        except zmq.ZMQError as fault:
            socket.close()
            raise ConfigError("serving_bind", f"cannot listen on {address}: {fault}") from fault
        port = int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._watch(socket, FAILED_HANDSHAKES, self._turned_away)
        return socket, f"{shown}:{port}"

    def connect(
        self,
        address: str,
        name: bytes,
        on_lost: Callable[[], None] = lambda: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> zmq.asyncio.Socket:
        """A socket to the node that listens at `address`, which knows this one by `name`.

        `on_lost` is called whenever the connection breaks, `on_refused` when none comes about for the keys of one
        side or the other; it is tried again by itself. Raises UserError for an address without a key.
        """
        socket = self._context.socket(zmq.DEALER)
        self._bound(socket)
        socket.set(zmq.ROUTING_ID, name)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        try:
            if self._keys is not None:
                socket.curve_serverkey = self._keys.of(address)
                socket.curve_publickey, socket.curve_secretkey = self._keys.own.public, self._keys.own.secret
            elif not is_local(address):
                raise UserError(f"{address} is beyond this machine, and there are no keys")
            host, port = split_address(address)
            socket.set(zmq.IPV6, int(":" in host))
            socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        except UserError:
            socket.close()
            raise
        self._watch(
            socket,
            zmq.Event.DISCONNECTED | FAILED_HANDSHAKES,
            lambda event: on_lost() if event == zmq.Event.DISCONNECTED else on_refused(),
        )
        return socket

    def _turned_away(self, event: int) -> None:
        if not self.refused["handshake"]:
            log.warning("a connection that is no node's, or has no key, was turned away; more are only counted")
        self.refused["handshake"] += 1

    async def close(self) -> None:
        """Close everything; what was not sent is dropped."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._door is not None:
            self._door.stop()
        self._context.destroy(linger=0)

    @staticmethod
    def _bound(socket: zmq.asyncio.Socket) -> None:
        """Let nothing be allocated that is larger than a message may be, nor wait for ever."""
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, MAX_WAITING)
        socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what was asked for
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)

    def _watch(self, socket: zmq.asyncio.Socket, events: int, heard: Callable[[int], None]) -> None:
        monitor = socket.get_monitor_socket(events)

        async def watch() -> None:
            with contextlib.suppress(zmq.ContextTerminated):
                while True:
                    said: Any = parse_monitor_message(await monitor.recv_multipart())
                    heard(said["event"])

        task = asyncio.get_running_loop().create_task(watch())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
