"""Case 100: a long paste splits into several messages. A bracketed one is one message, whatever it holds.

Keys go through the keyboard, the chat loop and the client to a server that remembers what it was asked.
"""

import threading

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxcel_cli.client import Client
from mlxcel_cli.conversation import Conversation
from mlxcel_cli.keyboard import Keyboard
from mlxcel_cli.repl import Repl
from mlxcel_cli.transport import InProcess
from tests.cli.double import Double

pytestmark = pytest.mark.anyio

BEGIN, END, ENTER, CTRL_D = b"\x1b[200~", b"\x1b[201~", b"\r", b"\x04"
KB_50 = 50_000
PASTES = {
    "short lines": "a line of code\n" * (KB_50 // 15),
    "one line": "word " * (KB_50 // 5),
    "commands": "so:\n" + "/bye\n/clear\n" * (KB_50 // 12) + "end",
    "quotes": 'def f():\n    """Say."""\n' * (KB_50 // 24) + "f()",
    "other letters": "né\U0001f600日本\n" * (KB_50 // 14),
    "returns": "a line\r\nthen\r" * (KB_50 // 13) + "end",
    "200 KB": "x" * 79 + "\n" + "a longer text of many lines\n" * 7000,
}


async def asked(keys: bytes, piece_bytes: int) -> list[str]:
    """The messages that a server is asked when a terminal sends `keys` in pieces."""
    double = Double()
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def send() -> None:
            for start in range(0, len(keys), piece_bytes):
                pipe.send_bytes(keys[start : start + piece_bytes])

        sending = threading.Thread(target=send)
        async with Client(InProcess(double.app()), "http://localhost") as client:
            conversation = Conversation(client, system=None, asked={}, warn=print)
            sending.start()
            await Repl(conversation, Keyboard(InMemoryHistory(), DummyOutput())).run()
        sending.join()
    return [body["messages"][-1]["content"] for _, body in double.asked]


@pytest.mark.parametrize("paste", PASTES.values(), ids=PASTES)
@pytest.mark.parametrize("piece_bytes", [1021, 65536])
async def test_a_bracketed_paste_is_one_message(paste, piece_bytes):
    assert len(paste.encode()) > 45_000
    keys = BEGIN + paste.encode() + END + ENTER + b"next" + ENTER + CTRL_D
    assert await asked(keys, piece_bytes) == [paste.replace("\r\n", "\n").replace("\r", "\n"), "next"]


async def test_it_can_be_edited_and_added_to_before_it_is_sent():
    paste = "a line\n" * 7000
    keys = b"Look: " + BEGIN + paste.encode() + END + b"Why?" + ENTER + CTRL_D
    assert await asked(keys, 4096) == [f"Look: {paste}Why?"]
