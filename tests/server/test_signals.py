"""`mlxcel serve` as a process of its own: what a signal ends, and what is left behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest


@contextmanager
def serving(tiny: Path, socket_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The process, once it says that it takes connections."""
    command = [sys.executable, "-m", "mlxcel_cli.main", "serve", str(tiny), "--host", str(socket_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("is served at" in line for line in process.stderr)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_signal_ends_it_cleanly(tiny: Path, tmp_path: Path, number: signal.Signals, is_asked: bool) -> None:
    socket_path = tmp_path / "s.sock"
    with serving(tiny, socket_path) as process:
        if is_asked:
            transport = httpx2.HTTPTransport(uds=str(socket_path))
            with httpx2.Client(transport=transport, base_url="http://tiny", timeout=60) as client:
                answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
                assert answer.status_code == 200
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not socket_path.exists()
