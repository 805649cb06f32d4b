"""The generation requests under way, by their ids, so that one can be ended from elsewhere or by the clock.

What ends a request is an error: before its answer has begun it is the answer, in a stream it is the last frame.
Its rows are freed within a tick. Knows no dialect.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Protocol, TypeVar

from engine.errors import MlxcelError
from server.errors import Cancelled, TimedOut
from server.generate import Usage
from server.sse import unless


class UnderWay(Protocol):
    """What has been begun for one request."""

    usage: Usage

    def fail(self, error: MlxcelError) -> None:
        """Cancel what still runs, and raise `error` where it is waited for."""
        ...

    def close(self) -> None:
        """Cancel what still runs; harmless when repeated."""
        ...


Begun = TypeVar("Begun", bound=UnderWay)


class Running:
    """One request under way."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[MlxcelError] = asyncio.get_running_loop().create_future()
        self._answer: UnderWay | None = None

    async def begun(self, beginning: Awaitable[Begun]) -> Begun:
        """What begins. Raises what ends the request before."""
        self._answer = answer = await unless(asyncio.shield(self._ended), beginning)
        if self._ended.done():
            answer.fail(self._ended.result())
        return answer

    def end(self, error: MlxcelError) -> None:
        """End it with `error`; harmless when repeated."""
        if self._ended.done():
            return
        self._ended.set_result(error)
        if self._answer is not None:
            self._answer.fail(error)


class RunningRequests:
    """All of them. Clients choose ids, so that several may have the same."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_id: dict[str, list[Running]] = {}

    @contextlib.contextmanager
    def entered(self, request_id: str) -> Iterator[Running]:
        """A request for as long as it is under way, which ends it when that is too long."""
        running = Running()
        self._by_id.setdefault(request_id, []).append(running)
        timer = self._timer(running)
        try:
            yield running
        finally:
            if timer is not None:
                timer.cancel()
            self._by_id[request_id].remove(running)
            if not self._by_id[request_id]:
                del self._by_id[request_id]

    def cancel(self, request_id: str) -> int:
        """End the requests of this id; how many there were."""
        found = self._by_id.get(request_id, ())
        for running in found:
            running.end(Cancelled(f"the request {request_id} was cancelled"))
        return len(found)

    def _timer(self, running: Running) -> asyncio.TimerHandle | None:
        if not self._timeout_s:
            return None
        error = TimedOut(
            f"the request took longer than {self._timeout_s:g} s, the --request-timeout of this server"
        )
        return asyncio.get_running_loop().call_later(self._timeout_s, running.end, error)
