"""One raw completion at a time over the Engine, without scheduler, loop and server.

The reference arm of parity checks and benchmarks: same plan, same forward, same sampler and finish step.
"""

from collections.abc import Iterator

from engine.engine import Engine
from engine.request import Event, Failed, Output, Request


class DirectEngine:
    """Runs requests to their end on the calling thread, which must be the one that opened `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan = engine.plan()

    def events(self, request: Request) -> Iterator[Event]:
        """Everything that happens to `request`, as it happens."""
        row = self._engine.submit(request)
        try:
            while not row.prefilled:
                yield from self._engine.prefill(self._plan.pieces([row], decoding=False))
            while row.finish_reason is None:
                yield from self._engine.step([row])
        finally:
            self._engine.release(row)

    def complete(self, request: Request) -> list[Output]:
        """The outputs of `request`. Raises what made it fail."""
        outputs = []
        for event in self.events(request):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Output):
                outputs.append(event)
        return outputs
