"""What rank 0 tells the other ranks, and how it travels: a length and MessagePack over one TCP connection each.

MLX's own collectives would carry it too, but on a ring a rank that waits in one keeps a core busy. A connection
that ends says that its other end has.
"""

import socket

import msgspec

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28  # the tokens of the longest prompt pieces are far below


class Hello(msgspec.Struct, tag="hello"):
    """A rank shows rank 0 that it was told the `secret`."""

    rank: int
    secret: bytes


class Begin(msgspec.Struct, tag="begin"):
    """How rank 0 runs rows from here on, new ones: the mode of the forward, and the type that keys and values are
    stored in ("": their own). While it `tries` modes, one may turn out not to fit the model.
    """

    mode: str
    cache_dtype: str = ""
    tries: bool = False


class Run(msgspec.Struct, tag="run"):
    """One forward: for each span its row's number, the tokens, and behind how many of them logits are wanted. The
    rows `gone` have ended before.
    """

    spans: list[tuple[int, list[int], int]]
    gone: list[int]


Message = Hello | Begin | Run
_decoder = msgspec.msgpack.Decoder(Message)


class Broken(Exception):
    """The connection ended within a message, or what came is none."""


def send(connection: socket.socket, message: Message) -> None:
    """Send `message`. Raises OSError where the other end is gone."""
    packed = msgspec.msgpack.encode(message)
    connection.sendall(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)


def receive(connection: socket.socket, most_bytes: int = MAX_MESSAGE_BYTES) -> Message | None:
    """The next message, or None where the other end closed the connection. Raises Broken and OSError."""
    head = _exactly(connection, LENGTH_BYTES)
    if head is None:
        return None
    num_bytes = int.from_bytes(head, "big")
    if num_bytes > most_bytes:
        raise Broken(f"a message of {num_bytes} bytes")
    packed = _exactly(connection, num_bytes)
    if packed is None:
        raise Broken("the connection ended within a message")
    try:
        return _decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise Broken(str(error)) from error


def _exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    """So many bytes, or None where the connection ended before the first."""
    held = bytearray()
    while len(held) < num_bytes:
        part = connection.recv(min(num_bytes - len(held), 1 << 20))
        if not part:
            if held:
                raise Broken("the connection ended within a message")
            return None
        held += part
    return bytes(held)
