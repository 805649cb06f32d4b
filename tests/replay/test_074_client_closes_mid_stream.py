"""Case 74: a client that closes its socket in the middle of a stream ends its own row, and the server goes on."""

import json
from pathlib import Path

import pytest

from tests.serving import CHAT, Live, live, settle

BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}


def read_chunks(live: Live, num_chunks: int) -> None:
    """Ask for a long stream and close the socket after some of its chunks."""
    body = json.dumps(BODY | {"stream": True, "max_tokens": 3000}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: tiny\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with live.socket() as connection, connection.makefile("rb") as lines:
        connection.sendall(head + body)
        seen = 0
        while seen < num_chunks:
            line = lines.readline()
            assert line, "the server closed the stream"
            seen += line.startswith(b"data: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "unix"])
def test_the_next_request_is_answered(tiny: Path, tmp_path: Path, host: str) -> None:
    with live(tiny, str(tmp_path / "m.sock") if host == "unix" else host) as server, server.client() as client:
        for num_chunks in (0, 1, 3, 20):
            read_chunks(server, num_chunks)
            response = client.post(CHAT, json=BODY | {"max_tokens": 4}, timeout=5)
            assert response.status_code == 200
            settle(server.loop)
