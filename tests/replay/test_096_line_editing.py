"""Case 96: no history, no line editing, and marks for the terminal's library (0x01, 0x02) written to the screen.

Keys typed at a pseudo-terminal reach a server as a person means them, now and in the next session; nothing but
text and what terminals know is written.
"""

import re
import socket

import pytest

from tests.cli.conftest import served
from tests.cli.double import Double
from tests.cli.terminal import Terminal

LEFT, HOME, UP, CTRL_W, CTRL_D = b"\x1b[D", b"\x1b[H", b"\x1b[A", b"\x17", b"\x04"
KNOWN = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>78]|[\r\n\x07\x08]")


def spoken(double: Double) -> list[str]:
    return [body["messages"][-1]["content"] for _, body in double.asked]


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_a_line_is_edited_kept_and_drawn_with_nothing_strange(environment, tmp_path):
    double, written = Double(), b""
    environment = {**environment, "XDG_DATA_HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as listener, served(double, listener):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for keys in ([b"bcd" + LEFT + b"x" + HOME + b"a", b"one two" + CTRL_W + b"three"], [UP, UP + UP]):
            terminal = Terminal(["chat", "--server", address], environment)
            terminal.wait_for(b">>>")
            for typed in keys:
                terminal.type(typed + b"\r")
                terminal.wait_for(b"Hello", b">>>")
            terminal.type(CTRL_D)
            assert terminal.ended() == 0
            terminal.close()
            written += terminal.all
    assert spoken(double) == ["abcxd", "one three", "one three", "abcxd"]
    assert re.findall(rb"[\x00-\x1f\x7f]", KNOWN.sub(b"", written)) == []
