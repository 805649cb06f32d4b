"""Case 98: what a chat loop has to understand, and that it ends when its input does, whatever was said.

With a real model in this process, through the program's own entry.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = (
    *("help", "bye", "clear", "system", "file", "save", "load"),
    *("set", "tokens", "stats", "reasoning", "retry", "undo"),
)
SHORT = ["-n", "3", "--temp", "1", "--seed", "3"]
PATIENCE_S = 120.0


def prompts(said: str) -> list[int]:
    """The prompt's tokens of every answer."""
    return [int(count) for count in re.findall(r"^prompt: (\d+) tokens", said, re.MULTILINE)]


@pytest.mark.parametrize("end", ["", "\n", "\n/bye\nnever asked"])
@pytest.mark.parametrize(
    "word",
    [
        "/nonsense",
        '"""two\nlines"""',
        '"""open',
        "",
        *(f"/{name}" for name in COMMANDS),
        "/set temp x",
        "/load no",
        "/?",
    ],
)
def test_a_piped_chat_ends_whatever_it_says(word, end, tiny: Path, mlxcel, capsys):
    assert mlxcel("chat", str(tiny), *SHORT, stdin=f"hi\n{word}{end}".encode()) in (0, 1)
    assert "never asked" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_pipe_that_ends_ends_the_program(command, tiny: Path):
    program = [sys.executable, "-c", "from mlxcel_cli.main import main; main()", command, str(tiny), *SHORT]
    ended = subprocess.run(program, input=b"hi", capture_output=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr


def test_three_quotes_hold_a_message_of_several_lines_together(tiny: Path, mlxcel, capsys):
    texts = (b'"""one\n\n/bye\ntwo"""\n', b'"""\none\n\n/bye\ntwo\n"""\n')
    counts = []
    for text in texts:
        assert mlxcel("chat", str(tiny), *SHORT, "--stats", stdin=text) == 0
        counts.append(prompts(capsys.readouterr().err))
    assert mlxcel("run", str(tiny), *SHORT, "--stats", "-p", "one\n\n/bye\ntwo") == 0
    assert counts == 2 * [prompts(capsys.readouterr().err)]


def test_clear_begins_anew(tiny: Path, mlxcel, capsys):
    assert mlxcel("chat", str(tiny), *SHORT, "--stats", stdin=b"hi\nhi\n/clear\nhi\n") == 0
    first, second, third = prompts(capsys.readouterr().err)
    assert first == third < second


@pytest.mark.parametrize("word", ["/?", "/help"])
def test_help_lists_every_command(word, tiny: Path, mlxcel, capsys):
    assert mlxcel("chat", str(tiny), stdin=word.encode()) == 0
    said = capsys.readouterr()
    assert set(re.findall(r"^/(\w+)", said.err, re.MULTILINE)) == set(COMMANDS)
    assert said.out == ""
