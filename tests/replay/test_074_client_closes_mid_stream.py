"""Case 74: a client that closes its socket in the middle of a stream ends its own row, and the server goes on."""

import json
import socket
from pathlib import Path

import pytest

from tests.serving import CHAT, live, settle

BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
LONG_ID = "x" * 128


def ask(connection: socket.socket, **more: int) -> None:
    """Post a long stream on a plain connection."""
    body = json.dumps(BODY | {"stream": True, "max_tokens": 1000} | more).encode()
    fields = f"host: localhost\r\nx-request-id: {LONG_ID}\r\ncontent-length: {len(body)}\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n"
    connection.sendall(head.encode() + body)


@pytest.mark.parametrize("host", ["127.0.0.1", "unix"])
def test_the_next_request_is_answered(tiny: Path, tmp_path: Path, host: str) -> None:
    with live(tiny, str(tmp_path / "m.sock") if host == "unix" else host) as server, server.client() as client:
        for num_chunks in (0, 1, 3, 20):
            with server.socket() as connection, connection.makefile("rb") as lines:
                ask(connection)
                seen = 0
                while seen < num_chunks:
                    line = lines.readline()
                    assert line, "the server closed the stream"
                    seen += line.startswith(b"data: ")
            response = client.post(CHAT, json=BODY | {"max_tokens": 4}, timeout=5)
            assert response.status_code == 200
            settle(server.loop)


def test_a_reader_that_reads_nothing_holds_up_nobody(tiny: Path, tmp_path: Path) -> None:
    """What it does not read is more than a socket holds: 1200 frames of 300 bytes and more."""
    with live(tiny, str(tmp_path / "m.sock")) as server, server.client() as client, server.socket() as connection:
        ask(connection, max_tokens=300, n=4)
        assert client.post(CHAT, json=BODY | {"max_tokens": 4}).status_code == 200
        settle(server.loop)
