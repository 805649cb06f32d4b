"""Rank 0: the ordinary engine under the ordinary loop, whose forward the other ranks run too.

Where another rank ends, so does this one: what they have computed together cannot be continued.
"""

import logging
import os
import signal
import stat
import threading
from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineStopped, MlxcelError
from engine.forward import Forward
from engine.model.split import Split
from engine.probe import Verdict
from engine.ranks.forward import chosen
from engine.ranks.links import Links
from engine.ranks.part import load_part
from engine.ranks.settings import OFF

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for the server to say so to its clients, when the ranks cannot go on
STDIN = 0


class Leader:
    """What rank 0 has of the others. `open` and `guard` are for the `EngineLoop`."""

    def __init__(self, split: Split, group: Any, links: Links) -> None:
        self._split = split
        self._group = group
        self._links = links
        self._fail: Callable[[MlxcelError], None] = lambda fault: None

    def open(self, config: EngineConfig) -> Engine:
        """The engine, on the thread that will run it."""
        loaded, unfused = load_part(config, self._split, self._group)
        engine = Engine(loaded, config, choose_forward=self._choose_forward)
        told = [note for note in engine.notes if not note.startswith("prompt cache:")]
        engine.notes = (f"kernels: portable (several ranks){unfused}", self._split.note, f"off: {OFF}", *told)
        return engine

    def guard(self, fail: Callable[[MlxcelError], None]) -> None:
        """Have `fail` called when the ranks cannot go on; if that does not end the process, this does."""
        self._fail = fail
        self._links.watch(lambda rank: self._lost(f"rank {rank} has ended"))
        _end_with_launcher()

    def _choose_forward(self, known: Verdict | None, model: Any, vocab_size: int) -> tuple[Forward, Verdict]:
        return chosen(
            model,
            vocab_size,
            in_turn=self._split.in_turn,
            tell=self._links.tell,
            fail=lambda fault: self._lost(f"a forward failed: {fault}"),
        )

    def _lost(self, reason: str) -> None:
        """The engine's thread may wait for ever for what another rank was to send."""
        self._fail(EngineStopped(f"the ranks cannot go on: {reason}"))
        timer = threading.Timer(GRACE_S, _give_up, [reason])
        timer.daemon = True
        timer.start()


def _give_up(reason: str) -> None:
    log.error("the ranks cannot go on: %s; MLX does not come back from waiting for it", reason)
    os._exit(1)


def _end_with_launcher() -> None:
    """End this process when the one that launched it has: MLX's launcher holds the other end of its stdin, a pipe,
    and does not end its ranks when it is told to end.
    """
    try:
        launched = stat.S_ISFIFO(os.fstat(STDIN).st_mode)
    except OSError:  # it is closed
        launched = False
    if not launched:
        return

    def wait() -> None:
        while os.read(STDIN, 4096):
            pass
        log.warning("the launcher of the ranks has ended")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="mlxcel-launcher", daemon=True).start()
