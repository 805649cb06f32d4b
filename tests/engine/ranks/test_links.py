"""Ranks find rank 0, strangers do not, and an end is noticed."""

import queue
import socket
import threading

import pytest

from engine.errors import EngineStopped
from engine.ranks import links
from engine.ranks.links import Links, as_numbers, connect, listen, of_numbers
from engine.ranks.messages import MAX_MESSAGE_BYTES, Begin, Broken, Run, receive, send

SECRET = bytes(range(16))
RUN = Run([(7, [1, 2, 3], 1), (8, [4], 0)], [5, 6])


@pytest.fixture
def met():
    """Rank 0's links, and the other end of the one to rank 1."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    found: queue.SimpleQueue[Links] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(Links.accept(listener, SECRET, 1)))
    thread.start()
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_turned_away(silent), "who is no rank"
    with connect("127.0.0.1", port, rank=1, secret=bytes(16)) as stranger:
        assert is_turned_away(stranger), "who does not know the secret"
    other = connect("127.0.0.1", port, rank=1, secret=SECRET)
    leading = found.get(timeout=30)
    thread.join()
    yield leading, other
    other.close()
    leading.close()


def is_turned_away(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_what_rank_0_says_arrives_in_its_order(met):
    leading, other = met
    for message in (Begin("spans", "float16"), RUN, Run([], [])):
        leading.tell(message)
    assert [receive(other) for _ in range(3)] == [Begin("spans", "float16"), RUN, Run([], [])]


def test_the_end_of_a_rank_is_noticed(met):
    leading, other = met
    lost: queue.SimpleQueue[int] = queue.SimpleQueue()
    leading.watch(lost.put)
    other.close()
    assert lost.get(timeout=30) == 1


def test_the_end_of_rank_0_is_noticed(met):
    leading, other = met
    leading.close()
    assert receive(other) is None


def test_who_does_not_come_is_missed(monkeypatch):
    monkeypatch.setattr(links, "PATIENCE_S", 0.01)
    with listen("127.0.0.1") as listener, pytest.raises(EngineStopped, match="of 2 other ranks 0 came"):
        Links.accept(listener, SECRET, 2)


@pytest.mark.parametrize(
    "sent", [b"\x00\x00", b"\x00\x00\x00\x05ab", b"\x00\x00\x00\x01\xc1", b"\xff\xff\xff\xff"]
)
def test_what_is_no_message_is_broken(sent):
    one, other = socket.socketpair()
    with one, other:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(Broken):
            receive(other)


def test_a_long_message_arrives_whole():
    one, other = socket.socketpair()
    with one, other:
        long = Run([(0, list(range(100_000)), 1)], [])
        thread = threading.Thread(target=send, args=(one, long))
        thread.start()
        assert receive(other, MAX_MESSAGE_BYTES) == long
        thread.join()


def test_port_and_secret_travel_as_numbers():
    assert of_numbers(as_numbers(65535, SECRET)) == (65535, SECRET)
