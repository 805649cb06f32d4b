"""Case 101: Ctrl-C while an answer is generated ends the program. It stops the answer and drops its turn, and the
chat goes on as if it had not been asked.

With a real model in this process; Ctrl-C typed at a terminal is in tests/cli/test_terminal.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel_cli import render

SAMPLED = ["--temp", "1", "--seed", "3", "--stats"]
STOPPED = "(stopped; the turn is dropped"


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """SIGINT after so many pieces of text have been shown."""

    def interrupt_at(count: int) -> None:
        put, puts = render.put, 0

        def put_and_interrupt(text: str) -> None:
            nonlocal puts
            put(text)
            if puts == count:
                os.kill(os.getpid(), signal.SIGINT)
            puts += 1

        monkeypatch.setattr(render, "put", put_and_interrupt)

    return interrupt_at


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupt_stops_the_answer_and_not_the_program(at, tiny: Path, mlxcel, interrupt_at, capsys):
    interrupt_at(at)
    assert mlxcel("chat", str(tiny), *SAMPLED, "-c", "2000", stdin=b"hi\n/retry\n/bye\n") == 0
    said = capsys.readouterr().err
    assert said.index(STOPPED) < said.index("new: ")


def test_the_next_turn_is_asked_as_if_the_stopped_one_had_not_been(tiny: Path, mlxcel, interrupt_at, capsys):
    mlxcel("chat", str(tiny), *SAMPLED, "-n", "5", stdin=b"second\n")
    undisturbed = capsys.readouterr()
    interrupt_at(2)
    assert (
        mlxcel("chat", str(tiny), *SAMPLED, "-n", "50", stdin=b"first, longer\n/set max_tokens 5\nsecond\n") == 0
    )
    disturbed = capsys.readouterr()
    assert STOPPED in disturbed.err
    assert disturbed.out.endswith(undisturbed.out)
    assert prompt_tokens(disturbed.err) == prompt_tokens(undisturbed.err)


def prompt_tokens(said: str) -> list[str]:
    return re.findall(r"prompt: (\d+) tokens", said)
