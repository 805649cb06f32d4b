"""The part that one process plays among several, from its start to its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, MlxcelError
from server.address import cannot_listen, listen, split_address
from server.bridge import Bridge
from server.config import ServerConfig
from server.roles.counts import Counts
from server.roles.keys import Keys, read_keys
from server.roles.router import Router
from server.roles.sockets import Sockets
from server.roles.worker import Worker

log = logging.getLogger(__name__)

GRACE_S = 4.0  # for what runs for routers when the process is told to stop


def _check_free(address: str) -> None:
    """Raise ConfigError where nobody can listen at `address` now: before a model is loaded for nothing."""
    try:
        listen(*split_address(address), backlog=1).close()
    except OSError as fault:
        raise cannot_listen("serving_bind", address, fault) from fault


class Node:
    """A router, or a worker beside an engine. Raises ConfigError for keys that are none, for an address of a node
    that has none, and for one of its own that cannot be had.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._keys: Keys | None = read_keys(config.node_key, config.node_peers)
        for name, address in (
            *(("prefill_peers", address) for address in config.prefill_peers),
            *(("decode_peers", address) for address in config.decode_peers),
        ):
            if self._keys is not None and address not in self._keys.by_address:
                raise ConfigError(name, f"{config.node_peers} has no key for the node at {address}")
        if config.serving_bind:
            _check_free(config.serving_bind)
        self._sockets: Sockets | None = None
        self.router: Router | None = None
        self.worker: Worker | None = None

    @property
    def counts(self) -> Counts:
        """What it has counted of what it says to others."""
        speaker = self.router or self.worker
        return Counts() if speaker is None else speaker.counts

    def loop(self, engine: EngineConfig, *, on_state: Callable[[], None], **_: Any) -> Router:
        """What stands in an engine's place at a router."""
        self.router = Router(
            engine,
            prefill=self._config.prefill_peers,
            decode=self._config.decode_peers,
            keys=self._keys,
            on_state=on_state,
        )
        return self.router

    async def waited(self, come: Awaitable[Any]) -> None:
        """Wait for what a request at a router needs, for a while."""
        assert self.router is not None, "a router was made"
        await self.router.waited(come)

    def start(self, bridge: Bridge, on_fault: Callable[[MlxcelError], None]) -> None:
        """Listen for routers, where this is a worker; called on the event loop."""
        if self._config.node_role == "router":
            return
        self._sockets = Sockets(self._keys)
        self._sockets.start()
        try:
            self.worker = Worker(
                bridge,
                self._sockets,
                self._config.serving_bind,
                self._config.node_role,
                keeps=not self._config.engine.no_prompt_cache,
            )
        except ConfigError as fault:
            on_fault(fault)
            return
        log.info("%s node listens at %s", self._config.node_role, self.worker.address)

    async def close(self) -> None:
        """Let what runs for routers end, for a while, and close everything."""
        if self.worker is not None:
            await self.worker.close(grace_s=GRACE_S)
        if self._sockets is not None:
            await asyncio.sleep(0)
            await self._sockets.close()
