"""Every command that README and docs show is run, on a tiny model under the built-in ones' names, or is named here
with the reason why not.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from engine.model.store import BUILT_IN, Store
from tests.adapters import write_adapter
from tests.cluster import Node, free_ports, until
from tests.tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATIENCE_S = 120

# What begins so is not run here.
ELSEWHERE = {
    "make ": "the Makefile is run to get here, and each of its targets takes minutes",
    "source ": "a shell's own command",
    "pipx ": "it installs from the package index; tests/packaging/test_wheel.py installs without",
    "uv ": "as pipx",
    "cp docs/deploy/mlxcel.plist": "a Mac's; tests/packaging/test_units.py reads the file",
    "launchctl ": "a Mac's",
    "brew ": "it wants a tap and Homebrew",
    "mlxcel run model.gguf": "tests/engine/model/test_gguf.py imports files of this kind",
    "mlxcel run mlx-community/": "the hub is out of reach; tests/engine/model has a double of it",
    "mlxcel pull": "the store has the tiny model under this name; tests/engine/model/test_pull.py fetches",
    "mlxcel rm": "tests/cli/test_models.py removes; the others here want the model",
    "mlxcel connect codex --write": "it asks first; tests/cli/connect answers",
    "mlxcel bench serve --url http://127.0.0.1:8080 --against": "it wants a second server, as in tests/cli/bench",
    "mlxcel chat --continue": "only at a terminal are chats kept; tests/cli/test_tmux.py has one",
    "mlxcel cluster status": "it wants a router; tests/server/roles has some",
    'mlxcel run -p "Name a person."': "the tiny model does not end its JSON; tests/cli/test_talk.py has schemas",
    "cat peers": "it shows a file that is written in the text",
    "mlxcel serve MODEL": "the address is another machine's; tests/server/roles/test_listeners.py has keys",
}


@dataclass(frozen=True)
class Example:
    """One command of a page, at a line."""

    page: str
    line: int
    command: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run here, or None."""
        return next((why for start, why in ELSEWHERE.items() if self.command.startswith(start)), None)


def examples() -> Iterator[Example]:
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(1)) + 1
            lines = block[1].splitlines()
            for number, shown in enumerate(lines):
                if shown.startswith("$ "):
                    yield Example(page.name, line + number, _whole(lines[number:]))


def _whole(lines: list[str]) -> str:
    """The command that begins with the first of these lines, until its quotes are closed."""
    command = lines[0].removeprefix("$ ")
    for following in lines[1:]:
        try:
            shlex.split(command, comments=True)
            return command
        except ValueError:
            command += "\n" + following
    return command


EXAMPLES = list(examples())
RUN = {" ".join(shlex.split(one.command, comments=True)): one for one in EXAMPLES if one.reason is None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the tiny model, under the names of the built-in ones."""
    home = tmp_path_factory.mktemp("home")
    for name in BUILT_IN:
        with Store(home).begin(f"mlxcel/{name}", source="made here") as folder:
            write_checkpoint(folder)
    return home


@pytest.fixture(scope="module")
def server(model: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """What stands at the port that the pages name."""
    checkpoint = model / "models" / "mlxcel" / "smollm2-135m"
    options = ["--alias", "smollm2-135m", "--adapters", str(place / "adapters" / "sql")]
    node = Node("server", [str(checkpoint), *options], tmp_path_factory.mktemp("server"))
    node.start()
    try:
        until(node.healthy, "the server")
        yield node
    finally:
        node.kill()


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the files that the pages name are there."""
    folder = tmp_path_factory.mktemp("place")
    adapted, _ = load_model(write_checkpoint(folder / "my-model"))
    for name in ("sql", "chat"):
        write_adapter(folder / "adapters" / name, adapted)
    (folder / "main.py").write_text("print('hello')\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "hello"\n')
    (folder / "notes.txt").write_text("It says hello.\n")
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"],
              "additionalProperties": False}  # fmt: skip
    (folder / "person.json").write_text(json.dumps(schema))
    for command in ("init -q", "add main.py", "-c user.name=a -c user.email=a@b commit -q -m one"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    (folder / "main.py").write_text("print('goodbye')\n")
    templates = folder / "config" / "mlxcel" / "templates"
    templates.mkdir(parents=True)
    (templates / "review.toml").write_text('system = "You are a $role."\nprompt = "Review: $input"\n')
    program = folder / "bin" / "mlxcel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlxcel_cli.main "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture
def environment(model: Path, place: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")},
        "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(place),
        "XDG_CONFIG_HOME": str(place / "config"),
        "XDG_DATA_HOME": str(place / "data"),
        "MLXCEL_HOME": str(model),
        "MLXCEL_N_PREDICT": "40",
        "MLXCEL_PORT": "0",
        "NO_COLOR": "1",
    }


@pytest.mark.parametrize("page", sorted({example.page for example in RUN.values()}))
def test_what_a_page_shows_runs(page: str, server: Node, place: Path, environment: dict[str, str]) -> None:
    for example in RUN.values():  # in the page's order: one may need what another wrote
        if example.page == page:
            assert_runs(example, server, place, environment)


def assert_runs(example: Example, server: Node, place: Path, environment: dict[str, str]) -> None:
    command = example.command
    if "jq" in command and shutil.which("jq") is None:
        command = command.partition("| jq")[0]
    if re.match(r"mlxcel serve\b", command):
        ports = free_ports(2)
        command = re.sub(r"--port \d+", f"--port {ports[0]}", command)
        command = re.sub(r"(--serving-bind \S+:)\d+", rf"\g<1>{ports[1]}", command)
        assert_serves(command, place, environment)
        return
    if said := re.match(r"mlxcel bench( serve)?\b", command):  # that it runs is seen by a little as well
        amount = "--repeats 1 --requests 4" if said[1] else "--repeats 1"
        command = re.sub(r"(\s*#.*)?$", f" {amount}", command, count=1)
    command = re.sub(r"(127\.0\.0\.1|localhost):8080", f"127.0.0.1:{server.port}", command)
    if re.match(r"mlxcel connect \w", command) and "--server" not in command:
        command = re.sub(r"(\s*#.*)?$", f" --server {server.url}", command, count=1)
    ended = subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, f"{example.name}: {command}\n{ended.stdout}\n{ended.stderr}"


def assert_serves(command: str, place: Path, environment: dict[str, str]) -> None:
    """It says where it serves, and ends when it is told to."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            shlex.split(command, comments=True), cwd=place, env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        timer = threading.Timer(PATIENCE_S, process.kill)
        timer.start()
        try:
            assert process.stderr is not None
            assert any(" served at " in line for line in process.stderr), command
            process.terminate()
            process.stderr.read()
            assert process.wait() == 0
        finally:
            timer.cancel()
            process.kill()
            process.communicate()


def test_every_reason_is_of_an_example() -> None:
    for start in ELSEWHERE:
        assert any(example.command.startswith(start) for example in EXAMPLES), start
