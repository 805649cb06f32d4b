"""What TAB offers: commands, every command's flags, and the names of models.

bash sources the committed script; zsh and fish are asked as their scripts ask.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from engine.model.store import BUILT_IN, Store
from mlxcel_cli.main import COMMANDS, build
from tests.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
ASK = """
source "$1/completions/mlxcel.bash"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$(complete -p mlxcel | sed 's/.*-F \\([^ ]*\\).*/\\1/')" mlxcel
printf '%s\\n' "${COMPREPLY[@]}"
"""
Complete = Callable[..., list[str]]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program called `mlxcel` that is the one under test, and a store with one model."""
    program = tmp_path / "bin" / "mlxcel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from mlxcel_cli.main import main; main()" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Store().begin("mlx-community/tiny", source="made here") as folder:
        write_checkpoint(folder)


@pytest.fixture
def complete(environment: None) -> Complete:
    """The completions that bash is given for the last of these words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")

    def complete(*words: str) -> list[str]:
        ended = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", ROOT, "mlxcel", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stderr == ""
        return ended.stdout.split()

    return complete


def flags(command: str) -> set[str]:
    group = typer.main.get_command(build([command]))
    options = group.commands[command].params
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")}


def test_commands(complete: Complete):
    assert complete("") == list(COMMANDS)
    assert complete("ch") == ["chat"]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_flag_of_a_command(command, complete: Complete):
    assert set(complete(command, "--")) - {"--help"} == flags(command)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["run", ""], sorted({*BUILT_IN, "tiny"})),
        (["chat", "-m", "t"], ["tiny"]),
        (["serve", "--port", "1", "smo"], ["smollm2-135m"]),
        (["pull", "s"], ["smollm2-135m"]),
        (["rm", ""], ["tiny"]),
        (["inspect", ""], ["tiny"]),
        (["run", "-p", '"it\'s a prompt"', "--temp"], ["--template", "--temp"]),
        (["run", "./"], []),  # so that the shell offers files
    ],
    ids=str,
)
def test_names_of_models(words, names, complete: Complete):
    assert complete(*words) == names


@pytest.mark.parametrize(
    ("shell", "asked"),
    [("zsh", {}), ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"})],
)
def test_other_shells_are_answered(shell, asked, environment: None):
    answers = [
        subprocess.run(
            ["mlxcel"],
            env={**os.environ, **asked, "_MLXCEL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for line in ("mlxcel serve --para", "mlxcel run t")
    ]
    assert "--parallel" in answers[0]
    assert "tiny" in answers[1]
