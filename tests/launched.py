"""Two ranks of `mlx.launch` that serve on a unix socket, as processes of their own, for tests and benchmarks."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[1]
LAUNCH = Path(sys.executable).with_name("mlx.launch")
PROGRAM = [sys.executable, "-m", "mlxcel_cli.main"]


class Launched:
    """The ranks of one server under their launcher: what they say, and their process ids by rank."""

    def __init__(self, launcher: subprocess.Popen[str], listens_at: Path) -> None:
        self.launcher = launcher
        self._listens_at = listens_at
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        rank_0, rank_1 = (
            self.wait_for(r"Started server process \[(\d+)\]"),
            self.wait_for(r"rank 1 \(process (\d+)"),
        )
        self.pids = [int(rank_0), int(rank_1)]

    @property
    def said(self) -> str:
        with self._changed:
            return "".join(self._said)

    def wait_for(self, pattern: str) -> str:
        """What the pattern's group matches, once that is said."""
        with self._changed:
            self._changed.wait_for(lambda: re.search(pattern, "".join(self._said)) or self._is_over, PATIENCE_S)
        found = re.search(pattern, self.said)
        assert found, self.said
        return found.group(found.re.groups)

    def client(self) -> httpx2.Client:
        return client(self._listens_at)

    def ended(self) -> str:
        """What all have said, once none of them is there any more."""
        self._reader.join(PATIENCE_S)  # each holds the pipe that is read
        assert not self._reader.is_alive(), self.said
        return self.said

    def close(self) -> None:
        for pid in self.pids:
            with_pid = Path(f"/proc/{pid}/cmdline")
            if with_pid.exists() and b"mlxcel_cli" in with_pid.read_bytes():
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            with self._changed:
                self._said.append(line)
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@contextmanager
def ranked(checkpoint: Path, tmp_path: Path, *flags: str) -> Iterator[Launched]:
    """Two ranks that serve, once both are there. stdin stays open: with one that has ended, the launcher spins."""
    listens_at = tmp_path / "ranks.sock"
    command = [str(LAUNCH), "-n", "2", "--backend", "ring", "-p", str(two_free_ports()), "--"]
    command += [*PROGRAM, "serve", str(checkpoint), "--host", str(listens_at), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as launcher:
        ranks = Launched(launcher, listens_at)
        try:
            yield ranks
        finally:
            ranks.close()
            launcher.kill()


def two_free_ports() -> int:
    """The first of two neighbours that nobody listens at."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


def client(listens_at: Path) -> httpx2.Client:
    transport = httpx2.HTTPTransport(uds=str(listens_at))
    return httpx2.Client(transport=transport, base_url="http://tiny", timeout=PATIENCE_S)
