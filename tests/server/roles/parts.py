"""A router and its nodes in one process, for tests that hold an engine or look inside."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from engine.config import EngineConfig
from mlxcel_cli.transport import InProcess
from server.app import make_app
from server.config import ServerConfig
from server.roles.router import Router
from server.roles.worker import Worker
from tests.serving import PATIENCE_S, Gate, Served, served

LOOK_S = 0.01


async def until(come: Callable[[], Any], what: str = "it") -> Any:
    """Wait for `come` to give something true."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not (found := come()):
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come"
        await asyncio.sleep(LOOK_S)
    return found


@dataclass
class Parts:
    """The router, a client of it, and its nodes in their order."""

    router: Router
    client: httpx2.AsyncClient
    prefill: list[Served] = field(default_factory=list)
    decode: list[Served] = field(default_factory=list)

    def worker(self, node: Served) -> Worker:
        worker: Worker = node.app.state.service.node.worker
        return worker

    async def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def up(self) -> None:
        await until(lambda: self.router.model and all(peer.takes for peer in self.router.peers), "every node")


@asynccontextmanager
async def node(checkpoint: Path, role: str, *, bind: str = "127.0.0.1:0", server: Any = (), **said: Any) -> Any:
    settings = {"node_role": role, "serving_bind": bind, **dict(server)}
    async with served(checkpoint, server=settings, **said) as service:
        yield service


def address_of(service: Served) -> str:
    address: str = service.app.state.service.node.worker.address
    return address


@asynccontextmanager
async def parts(
    checkpoint: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    gates: dict[str, Gate] | None = None,
    of_nodes: dict[str, Any] | None = None,
    **of_router: Any,
) -> AsyncIterator[Parts]:
    """So many nodes and a router that has them all; `gates` by role hold the engines of that role."""
    async with AsyncExitStack() as stack:
        pools: dict[str, list[Served]] = {"prefill": [], "decode": []}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for _ in range(count):
                gate = (gates or {}).get(role)
                pools[role].append(
                    await stack.enter_async_context(node(checkpoint, role, gate=gate, **(of_nodes or {})))
                )
        peers = {f"{role}_peers": tuple(map(address_of, pool)) for role, pool in pools.items()}
        config = ServerConfig(EngineConfig(model=checkpoint, **of_router), "tiny", node_role="router", **peers)
        app = make_app(config)
        client = httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=PATIENCE_S)
        await stack.enter_async_context(client)
        await client.get("/health")  # starts the application
        one = Parts(app.state.service.node.router, client, **pools)
        await one.up()
        yield one
