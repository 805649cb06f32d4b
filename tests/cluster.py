"""Real processes for tests: a router with its nodes on loopback, each of which can be killed and started again."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2

PATIENCE_S = 90.0
ADDRESS = re.compile(r"is served at (\S+)")
LOOK_S = 0.02


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def until(come: Callable[[], Any], what: str) -> Any:
    """Wait for `come` to give something true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := come()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(LOOK_S)
    return found


class Node:
    """One `mlxcel serve`, with its HTTP port and what it says."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.port = free_ports(1)[0]
        self._arguments = [*arguments, "--port", str(self.port)]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.codes: list[int] = []  # that it has ended with by itself, when it was told to

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        command = [sys.executable, "-m", "mlxcel_cli.main", "serve", *self._arguments]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(PATIENCE_S)
        if number != signal.SIGKILL:
            self.codes.append(code)

    def healthy(self) -> bool:
        assert self.is_running, f"{self.name} has ended:\n{self.said()}"
        try:
            return httpx2.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False


class Cluster:
    """A router, its nodes, and a client of the router's."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        prefill: int,
        decode: int,
        of_nodes: Sequence[str] = (),
        of_router: Sequence[str] = (),
        keys: Callable[[str, int], Sequence[str]] = lambda name, port: (),
    ) -> None:
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.ports = ports
        self.nodes = {}
        for name, port in ports.items():
            role = name.partition("-")[0]
            said = [str(model), "--node-role", role, "--serving-bind", f"127.0.0.1:{port}", *of_nodes]
            self.nodes[name] = Node(name, [*said, *keys(name, port)], folder)
        said = [str(model), "--node-role", "router", *of_router, *keys("router", 0)]
        for role in ("prefill", "decode"):
            peers = [f"127.0.0.1:{port}" for name, port in ports.items() if name.startswith(role)]
            said += [f"--{role}-peers", ",".join(peers)] if peers else []
        self.router = Node("router", said, folder)
        self.client = httpx2.Client(base_url=self.router.url, timeout=PATIENCE_S)

    @property
    def all(self) -> list[Node]:
        return [*self.nodes.values(), self.router]

    def start(self) -> None:
        for node in self.all:
            node.start()
        self.up()

    def up(self) -> None:
        """Wait until the router has every node."""
        until(self.router.healthy, "the router")
        until(lambda: all(node["status"] == "up" for node in self.stats()["nodes"]), "every node")

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.client.get("/router/stats").json()
        return stats

    def metric(self, name: str, line: str) -> float:
        """One sample of a node's metrics."""
        url = self.nodes[name].url if name in self.nodes else self.router.url
        text = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def idle(self, name: str) -> bool:
        """Whether a node has no row and holds no memory of one."""
        slots = httpx2.get(f"{self.nodes[name].url}/slots", timeout=PATIENCE_S).json()
        held = self.metric(name, 'mlxcel_kv_blocks{state="held"}')
        return not any(slot["is_processing"] for slot in slots) and held == 0

    def close(self) -> None:
        self.client.close()
        for node in self.all:
            if node.is_running:
                node.kill()


@contextmanager
def cluster(model: Path, folder: Path, *, prefill: int = 2, decode: int = 2, **said: Any) -> Iterator[Cluster]:
    """One that runs, with every node there."""
    folder.mkdir(parents=True, exist_ok=True)
    one = Cluster(model, folder, prefill=prefill, decode=decode, **said)
    try:
        one.start()
        yield one
    except BaseException:
        for node in one.all:
            print(f"--- {node.name}\n{node.said()[-3000:]}", file=sys.stderr)
        raise
    finally:
        one.close()


def streamed(client: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fold of a stream of chat completion or completion: text, reasons, calls, logprobs, errors, and whether
    it ended well.
    """
    text, reason, calls, logprobs, errors, done = "", None, [], [], [], False
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            response.read()
            return {"status": response.status_code, "errors": [response.text]}
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    errors.append(chunk["error"]["message"])
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", choice)
                    text += delta.get("content") or delta.get("text") or ""
                    calls += delta.get("tool_calls") or []
                    logprobs += (choice.get("logprobs") or {}).get("content") or []
                    reason = choice["finish_reason"] or reason
    for call in calls:
        call.pop("id", None)
    return {
        "status": 200, "text": text, "reason": reason, "calls": calls, "logprobs": logprobs, "errors": errors,
        "done": done,
    }  # fmt: skip


def resident_bytes(pid: int) -> int:
    """What a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
