"""Cases 97, 98 and 101: answers that end too early, chat loops that hang, Ctrl-C that ends the program.

All with a real model in this process, through the program's own entry. Case 100 (pastes) is in
tests/cli/test_keyboard, Ctrl-C at a real terminal in tests/cli/test_terminal.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel_cli import render
from mlxcel_cli.main import outcome
from tests.tiny import write_checkpoint

CONTEXT = 300
SAMPLED = ["--temp", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def mlxcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The program, with a file that holds `stdin`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*arguments: str, stdin: bytes = b"") -> int:
        path = tmp_path / "stdin"
        path.write_bytes(stdin)
        with open(path) as file:
            monkeypatch.setattr(sys, "stdin", file)
            return outcome(arguments)

    return run


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_097_without_a_limit_an_answer_runs_to_its_end_or_the_contexts(command, tiny, mlxcel, capsys):
    assert mlxcel(command, tiny, "-c", str(CONTEXT), "--stats", stdin=b"hi") == 0
    said = capsys.readouterr().err
    prompt, new = (int(re.search(rf"{what}: (\d+) tokens", said)[1]) for what in ("prompt", "new"))
    assert new > 100
    assert prompt + new == CONTEXT
    assert f"(cut at {new} tokens: the context is full" in said


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_097_an_answer_that_a_limit_cuts_says_so(limit, tiny, mlxcel, capsys):
    assert mlxcel("run", tiny, "-p", "hi", "-n", str(limit), *SAMPLED) == 0
    assert f"by --max-tokens {limit}" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["", "\n", "\n/bye\n", "\n/bye\nnever asked"])
@pytest.mark.parametrize(
    "word", ["/?", "/clear", "/system", "/retry", "/nonsense", '"""two\nlines"""', '"""open', ""]
)
def test_098_a_piped_chat_ends_whatever_it_says(word, end, tiny, mlxcel, capsys):
    assert mlxcel("chat", tiny, "-n", "3", *SAMPLED, stdin=f"hi\n{word}{end}".encode()) == 0
    assert "never asked" not in capsys.readouterr().out


@pytest.mark.parametrize("at", [0, 1, 5])
def test_101_an_interrupt_stops_the_answer_and_not_the_program(at, tiny, mlxcel, monkeypatch, capsys):
    puts = 0
    put = render.put

    def put_and_interrupt(text: str) -> None:
        nonlocal puts
        put(text)
        if puts == at:
            os.kill(os.getpid(), signal.SIGINT)
        puts += 1

    monkeypatch.setattr(render, "put", put_and_interrupt)
    assert mlxcel("chat", tiny, *SAMPLED, "-c", "2000", "--stats", stdin=b"hi\n/retry\n/bye\n") == 0
    said = capsys.readouterr().err
    assert said.index("(stopped; the turn is dropped") < said.index("new: ")
