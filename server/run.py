"""Put the application on the network: uvicorn with uvloop and httptools, on TCP or a unix socket."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from engine.errors import MlxcelError
from server.address import cannot_listen, listen
from server.app import make_app
from server.config import ServerConfig

log = logging.getLogger(__name__)

BACKLOG = 2048
GRACE_S = 5  # for what still runs when the server is told to stop
ENDING_S = 5  # for what was ended then


def serve(
    config: ServerConfig, on_ready: Callable[[str], None] = lambda address: None, **loop_options: Any
) -> int:
    """Serve until told to stop; return the exit code. Raises ConfigError where the address cannot be had.

    `on_ready` gets the address once it accepts connections. An engine that is gone for good ends the server
    with code 1. `loop_options` reach the `EngineLoop`.
    """
    faults: list[MlxcelError] = []

    def end(fault: MlxcelError) -> None:
        faults.append(fault)
        server.should_exit = True

    app = make_app(config, on_fault=end, **loop_options)
    listener, address = _listen(config)
    server = _Server(
        uvicorn.Config(
            app,
            loop="auto",
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE_S + ENDING_S,
            server_header=False,
        ),
        started=lambda: on_ready(address),
        end_watching=lambda: app.state.service.models.end_watching(),
        end_requests=lambda: app.state.service.models.end(),
    )
    try:
        with _signals_end_here():
            server.run(sockets=[listener])
    finally:
        if config.is_unix_socket:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.host)
    for fault in faults[:1]:
        log.error("%s", fault)
    return 1 if faults else 0


@contextlib.contextmanager
def _signals_end_here() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it has shut down; by then it has done its work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is up, and whose last requests hear of the end in their own answers.

    Whoever only watches is not waited for.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        started: Callable[[], None],
        end_watching: Callable[[], None],
        end_requests: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tell = started
        self._end_watching = end_watching
        self._end_requests = end_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_watching()
        ending = asyncio.get_running_loop().call_later(GRACE_S, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _listen(config: ServerConfig) -> tuple[socket.socket, str]:
    """A bound socket and its address as a person would write it."""
    try:
        if config.is_unix_socket:
            return _unix_listener(Path(config.host)), config.host
        listener = listen(config.host, config.port, BACKLOG)
    except OSError as fault:
        where = config.host if config.is_unix_socket else f"{config.host}:{config.port}"
        raise cannot_listen("host", where, fault) from fault
    host = f"[{config.host}]" if ":" in config.host else config.host
    return listener, f"http://{host}:{listener.getsockname()[1]}"


def _unix_listener(path: Path) -> socket.socket:
    """A unix socket that only its owner may use; a path left by a dead server is taken over."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError("another server answers there")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
