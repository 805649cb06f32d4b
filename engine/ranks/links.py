"""The connections between rank 0 and the others, beside MLX's own: found at the start, and watched to the end."""

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Sequence

from engine.errors import EngineStopped
from engine.ranks.messages import Broken, Hello, Message, receive, send

SECRET_BYTES = 16
PATIENCE_S = 60.0  # for each to connect, once all are known to run
HELLO_S = 5.0  # for who has connected to say who it is
HELLO_BYTES = 1024


class Links:
    """Rank 0's connections to the others, by their ranks."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections

    @classmethod
    def accept(cls, listener: socket.socket, secret: bytes, num_others: int) -> "Links":
        """Wait for the other ranks; whoever does not know the `secret` is turned away. Raises EngineStopped."""
        connections: dict[int, socket.socket] = {}
        listener.settimeout(PATIENCE_S)
        while len(connections) < num_others:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise EngineStopped(f"of {num_others} other ranks {len(connections)} came to rank 0") from None
            rank = _shown(connection, secret)
            if rank is None or rank in connections:
                connection.close()
            else:
                connections[rank] = connection
        listener.close()
        return cls(connections)

    def tell(self, message: Message) -> None:
        """Send `message` to every other rank. Raises OSError where one is gone."""
        for connection in self._connections.values():
            send(connection, message)

    def close(self) -> None:
        """Let every other rank see that this one ends."""
        for connection in self._connections.values():
            connection.close()

    def watch(self, lost: Callable[[int], None]) -> None:
        """Have `lost` called, on a thread of its own, with each rank whose connection ends."""
        for rank, connection in self._connections.items():

            def wait(rank: int = rank, connection: socket.socket = connection) -> None:
                with contextlib.suppress(OSError, Broken):
                    receive(connection)  # nothing is said this way: it returns at the end
                lost(rank)

            threading.Thread(target=wait, name=f"mlxcel-rank-{rank}", daemon=True).start()


def _shown(connection: socket.socket, secret: bytes) -> int | None:
    """The rank of a connection that shows the secret in time, or None."""
    connection.settimeout(HELLO_S)
    try:
        said = receive(connection, HELLO_BYTES)
    except (OSError, Broken):
        return None
    if not isinstance(said, Hello) or not hmac.compare_digest(said.secret, secret):
        return None
    _prepare(connection)
    return said.rank


def listen(host: str) -> socket.socket:
    """Where rank 0 hears the others, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def connect(host: str, port: int, *, rank: int, secret: bytes) -> socket.socket:
    """The connection of `rank` to rank 0. Raises EngineStopped."""
    try:
        connection = socket.create_connection((host, port), PATIENCE_S)
        send(connection, Hello(rank, secret))
    except OSError as fault:
        raise EngineStopped(f"rank {rank} cannot reach rank 0 at {host}:{port}: {fault}") from fault
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def as_numbers(port: int, secret: bytes) -> list[int]:
    """Port and secret as whole numbers, which is what ranks can share before they are connected."""
    return [port, *secret]


def of_numbers(numbers: Sequence[int]) -> tuple[int, bytes]:
    return numbers[0], bytes(numbers[1:])
