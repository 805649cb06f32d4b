"""Every other rank: it runs the forwards that rank 0 tells it of, and ends when rank 0 does.

It waits for a message on a socket, which takes no time of a core, and never in MLX while nothing runs.
"""

import logging
import os
import queue
import signal
import socket
import threading
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineStopped
from engine.model.split import Split
from engine.ranks.forward import Mirror
from engine.ranks.messages import Begin, Broken, Message, Run, receive
from engine.ranks.part import load_part

log = logging.getLogger(__name__)

END_S = 15.0  # for rank 0 to end first: longer than a server takes to drain
GRACE_S = 5.0  # for a forward to come back, once rank 0 is gone


class Follower:
    """One other rank; `connection` is that to rank 0."""

    def __init__(self, config: EngineConfig, split: Split, group: Any, connection: socket.socket) -> None:
        assert config.ranks is not None, "one process follows nobody"
        self._rank = config.ranks.rank
        self._config = config
        self._split = split
        self._group = group
        self._connection = connection
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_over = threading.Event()

    def follow(self) -> int:
        """Run forwards on the main thread until rank 0 ends; return the exit code. Raises MlxcelError."""
        _leave_signals_to_rank_zero()
        threading.Thread(target=self._read, name="mlxcel-rank-0", daemon=True).start()
        try:
            loaded, _ = load_part(self._config, self._split, self._group)
            mirror = Mirror(loaded.model, loaded.vocab_size, in_turn=self._split.in_turn)
            log.info("rank %d (process %d) follows rank 0", self._rank, os.getpid())
            while (message := self._messages.get()) is not None:
                if isinstance(message, Begin):
                    mirror.begin(message)
                elif isinstance(message, Run):
                    mirror.run(message)
        except RuntimeError as fault:  # what MLX raises where a connection of its own has ended
            if not self._is_over.wait(GRACE_S):
                raise EngineStopped(f"a forward failed on this rank: {fault}") from fault
        log.info("rank 0 has ended, and so does this rank")
        return 0

    def _read(self) -> None:
        """Queue what rank 0 says; when it is gone, end this process even if a forward waits for it."""
        try:
            while (message := receive(self._connection)) is not None:
                self._messages.put(message)
        except (OSError, Broken) as fault:
            log.warning("the connection to rank 0 broke: %s", fault)
        self._is_over.set()
        self._messages.put(None)
        timer = threading.Timer(GRACE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


def _leave_signals_to_rank_zero() -> None:
    """Ctrl-C and a request to end reach all ranks of a host, and rank 0 has clients to answer first: this one ends
    with it or, told to end by itself, some time later.
    """

    def told_to_end(number: int, frame: object) -> None:
        timer = threading.Timer(END_S, os._exit, [128 + number])
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, told_to_end)
