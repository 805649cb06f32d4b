"""A server double at a real address, and the program run in this process."""

import contextlib
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from mlxcel_cli.main import outcome
from tests.cli.double import Double


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings, store or history of whoever runs the tests."""
    for variable in [name for name in os.environ if name.startswith("MLXCEL_")]:
        monkeypatch.delenv(variable)
    for variable, folder in (("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data"), ("MLXCEL_HOME", "home")):
        monkeypatch.setenv(variable, str(tmp_path / folder))


@contextlib.contextmanager
def served(double: Double, listener: socket.socket) -> Iterator[None]:
    """Serve `double` at `listener`, which takes connections already, until the block ends."""
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(double.app(), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def address(double: Double) -> Iterator[str]:
    """Where `double` listens on TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener, served(double, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def mlxcel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The program, run in this process with a pipe that holds `stdin` (None: a closed stdin)."""

    def run(*arguments: str, stdin: bytes | None = b"") -> Outcome:
        if stdin is None:
            monkeypatch.setattr(sys, "stdin", None)
            code = outcome(arguments)
        else:
            reader, writer = os.pipe()
            threading.Thread(target=_fill, args=(writer, stdin)).start()
            with open(reader) as pipe:
                monkeypatch.setattr(sys, "stdin", pipe)
                code = outcome(arguments)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return run


def _fill(descriptor: int, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), io.FileIO(descriptor, "w") as pipe:
        while content:
            content = content[pipe.write(content) :]
