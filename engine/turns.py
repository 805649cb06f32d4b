"""The one thread that touches MLX, on which loops take turns: one for each model that is loaded.

Whoever has the more urgent request goes first, among equals who waited longest; nobody is passed over more than
`MOST_PASSED` times in a row. A load is a turn as well, so that it runs beside nothing. It knows no models and no
requests.
"""

import atexit
import gc
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

MOST_PASSED = 4


class Member(Protocol):
    """Who takes turns. All but `begin`, `turn` and `leave` are called with the thread's condition held."""

    @property
    def is_called(self) -> bool:
        """Whether there is mail."""
        ...

    @property
    def due_s(self) -> float:
        """When it wants a turn though nothing comes, by `time.monotonic`."""
        ...

    @property
    def urgency(self) -> int:
        """0 is the most urgent."""
        ...

    def begin(self) -> bool:
        """Get ready; whether that went well."""
        ...

    def turn(self) -> bool:
        """Take the mail and run one tick; whether there will be another turn."""
        ...

    def leave(self) -> None:
        """Let everything go: there is no further turn."""
        ...


class MlxThread:
    """Runs the turns of its members. It ends with the last of them, or with `end` where it `stays` for others.

    `wake` guards what members are told from other threads, and is notified when they are.
    """

    def __init__(self, *, stays: bool = False) -> None:
        self.wake = threading.Condition()
        self._stays = stays
        self._coming: list[Member] = []
        self._members: list[Member] = []
        self._passed: dict[Member, int] = {}
        self._thread: threading.Thread | None = None
        self._is_over = False
        if stays:
            atexit.register(self.end)

    def join(self, member: Member) -> None:
        """Have `member` begin, and take turns from then on."""
        with self.wake:
            self._coming.append(member)
            self.wake.notify()
            if self._thread is None or self._is_over:
                self._is_over = False
                self._thread = threading.Thread(target=self._run, name="mlxcel-engine", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """End when the last member has left, and wait for that."""
        with self.wake:
            self._stays = False
            self.wake.notify()
        atexit.unregister(self.end)
        self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; whether it has come."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (member := self._next()) is not None:
                self._passed[member] = 0
                if member in self._members:
                    goes_on = member.turn()
                else:
                    self._members.append(member)
                    goes_on = member.begin()
                if not goes_on:
                    self._members.remove(member)
                    del self._passed[member]
                    member.leave()
                    if self._members or self._stays:
                        _give_back()
        finally:
            _leave()

    def _next(self) -> Member | None:
        """Who has the next turn, waited for; None: it is over."""
        with self.wake:
            while True:
                if self._coming:
                    return self._coming.pop(0)
                if not (self._members or self._stays):
                    self._is_over = True
                    return None
                now_s = time.monotonic()
                ready = [one for one in self._members if one.is_called or one.due_s <= now_s]
                if ready:
                    return ready[0] if len(ready) == 1 else self._first(ready)
                due_s = min((one.due_s for one in self._members), default=float("inf"))
                self.wake.wait(min(max(due_s - now_s, 0.0), threading.TIMEOUT_MAX))

    def _first(self, ready: Sequence[Member]) -> Member:
        """Who of several goes first; the others are passed over."""
        first = min(
            ready,
            key=lambda one: (
                self._passed[one] < MOST_PASSED,
                -self._passed[one] if self._passed[one] >= MOST_PASSED else one.urgency,
                -self._passed[one],
            ),
        )
        for one in ready:
            self._passed[one] += one is not first
        return first


def _give_back() -> None:
    """Return the memory of who has left: what refers to itself is found first."""
    gc.collect()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_cache()


def _leave() -> None:
    """End what MLX keeps for this thread, which aborts the process if it outlives the thread at exit."""
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_streams()
