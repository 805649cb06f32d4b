"""The async side of the engine's loop: submit, iterate events, cancel.

Owns the loop's thread for the life of the application. Events of one tick cross over in one wake-up. Slow
readers are buffered up to their row's bound; a row is never paused for its reader.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config import EngineConfig
from engine.errors import AdapterError, EngineStopped, MlxcelError
from engine.handover import Arriving, Identity
from engine.loop import EngineLoop, Ticket
from engine.metrics import Metrics, Numbers
from engine.request import CacheStats, Event, Failed, Output, Request
from engine.served import ServedModel, Slot
from engine.speculate.policy import DraftPolicy
from engine.watch import Moment

if TYPE_CHECKING:
    from engine.adapters.mounts import Mounted

log = logging.getLogger(__name__)

NUM_TEXT_WORKERS = 2
T = TypeVar("T")


class Events:
    """What happens to the requests of one submission, as pairs of the request's index and an event.

    Iteration ends when all have finished, and raises what made one fail. `close` cancels what still runs.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Event | MlxcelError]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._num_running = 0
        self._cancel: Callable[[Ticket], None] = lambda ticket: None

    def submit(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        """Enqueue all of `requests` or, where that raises, none."""
        self._cancel = loop.cancel
        try:
            for index, request in enumerate(requests):
                self._tickets.append(loop.submit(request, self._deliver_to(index)))
        except MlxcelError:
            self.close()
            raise
        self._num_running = len(requests)

    def _deliver_to(self, index: int) -> Callable[[Event | MlxcelError], None]:
        return lambda event: self._queue.put_nowait((index, event))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._num_running:
            index, event = await self._queue.get()
            if isinstance(event, MlxcelError):
                raise event
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Output) and event.finish_reason is not None:
                self._num_running -= 1
            yield index, event

    def fail(self, error: MlxcelError) -> None:
        """Cancel every request that has not ended, and raise `error` where this is iterated."""
        self.close()
        self._queue.put_nowait((0, error))

    def close(self) -> None:
        """Cancel every request that has not ended; harmless when repeated."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            self._cancel(ticket)


async def _for_ever(come: Awaitable[Any]) -> None:
    await come


class Bridge:
    """The engine as the server sees it. `on_loaded` is called when the model is there, `on_fault` when the engine
    is gone for good. With a `name` the log says which of several it is about.

    `loop` makes what runs it, or what stands in its place and has others run it, and `wait` bounds how long a
    request waits for that to be ready. What was stopped may be started again; what it counts goes on.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_fault: Callable[[MlxcelError], None] = lambda fault: None,
        on_loaded: Callable[[], None] = lambda: None,
        name: str = "",
        loop: Callable[..., Any] = EngineLoop,
        wait: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
        **loop_options: Any,
    ) -> None:
        self._wait = wait or _for_ever
        self._make = functools.partial(
            loop, post=self._post, on_state=self._on_state, metrics=Metrics(), **loop_options
        )
        self._loop: EngineLoop = self._make(config)
        self._hear: Callable[[Sequence[Moment]], None] | None = None
        self._on_fault = on_fault
        self._on_loaded = on_loaded
        self._said = f"{name}: %s" if name else "%s"
        self._loaded = asyncio.Event()
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._text_workers = ThreadPoolExecutor(NUM_TEXT_WORKERS, thread_name_prefix="mlxcel-text")

    def start(self, config: EngineConfig | None = None) -> None:
        """Start loading the model, anew by another `config` where one is given; called on the event loop that
        will use this.
        """
        self._asyncio = asyncio.get_running_loop()
        if config is not None:
            self._loaded.clear()
            self._loop = self._make(config)
            self.listen(self._hear)
        self._loop.start()

    def end(self) -> None:
        """End everything that runs or waits, after the running step; each request hears EngineStopped."""
        self._loop.stop(timeout_s=0)
        self._loaded.set()

    async def text_work(self, work: Callable[[], T]) -> T:
        """Run what templates and tokenizers have to do, off the event loop; dropped if it was not begun when the
        caller is cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(self._text_workers, work)

    async def stop(self) -> None:
        """End everything and wait until the engine has stopped."""
        self.end()
        await asyncio.to_thread(self._loop.stop)

    async def close(self) -> None:
        """Stop for good."""
        self._text_workers.shutdown(wait=False, cancel_futures=True)
        await self.stop()

    @property
    def model_now(self) -> ServedModel | None:
        """The model if it is loaded and served."""
        return self._loop.model if self._loop.fault is None else None

    @property
    def fault(self) -> MlxcelError | None:
        """What ended the engine, or kept it from starting."""
        return self._loop.fault

    async def model(self) -> ServedModel:
        """Wait for the model to be loaded. Raises what kept it from that, or what has ended the engine since."""
        await self._wait(self._loaded.wait())
        if self._loop.fault is not None:
            raise self._loop.fault
        if self._loop.model is None:
            raise EngineStopped("the engine ended before the model was loaded")
        return self._loop.model

    @property
    def capacity(self) -> int:
        """How many requests may run and wait at once."""
        return self._loop.capacity

    @property
    def is_full(self) -> bool:
        """Whether a request that came now would be refused."""
        return self._loop.is_full

    def numbers(self) -> Numbers:
        """What the engine has counted, and what stands now."""
        return self._loop.numbers()

    def refused(self) -> None:
        """Count a request that was refused before it came here."""
        self._loop.metrics.refused()

    def slots(self) -> list[Slot | None]:
        """What each slot does now, None where it is free."""
        return self._loop.slots()

    def listen(self, hear: Callable[[Sequence[Moment]], None] | None) -> None:
        """Have `hear` called, on the event loop, with what happens to requests from now on; None: nobody hears."""
        self._hear = hear
        told = None if hear is None else lambda moments: self._post(functools.partial(hear, moments))
        self._loop.watch.listener = told

    def silent_s(self) -> float:
        """How long work has been in flight without a token or a stored piece; 0 when there is none."""
        return self._loop.silent_s()

    def submit(self, requests: Sequence[Request]) -> Events:
        """Enqueue requests together. Raises QueueFull or EngineStopped."""
        events = Events()
        events.submit(self._loop, requests)
        return events

    def enqueue(
        self,
        request: Request,
        deliver: Callable[[Event | MlxcelError], None],
        arriving: Arriving | None = None,
        *,
        is_accepted: bool = False,
    ) -> Ticket:
        """Enqueue one request whose events go to `deliver`; with what is `arriving`, if it comes with a state.
        `is_accepted`: it belongs to work that had a place before.

        Raises QueueFull, unless it is accepted, or EngineStopped.
        """
        return self._loop.submit(request, deliver, arriving, is_accepted=is_accepted)

    def cancel(self, ticket: Ticket) -> None:
        """End what `enqueue` has begun, or give up what it has left; harmless when it has ended."""
        self._loop.cancel(ticket)

    async def identity(self) -> Identity:
        """Whose rows fit this engine's. Raises as `cache_stats` does."""
        return await self._asked(lambda engine: engine.transfer.identity)

    def warm_up(self, request: Request) -> None:
        """Have the beginning of a prompt that is expected stored when nothing else runs."""
        self._loop.warm_up(request)

    async def cache_stats(self) -> CacheStats:
        """What the prompt cache holds. Raises what keeps the engine from answering."""
        return await self._asked(lambda engine: engine.cache_stats())

    async def reset_cache(self) -> int:
        """Drop what the prompt cache holds; the bytes that this freed. Raises as `cache_stats` does."""
        return await self._asked(lambda engine: engine.prompts.reset())

    async def mount(self, name: str, folder: Path) -> "Mounted":
        """Mount an adapter. Raises AdapterError, and as `cache_stats` does."""
        return await self._asked(lambda engine: engine.adapters.mount(name, folder))

    async def unmount(self, name: str) -> "Mounted | None":
        """Let no request choose the adapter any more. Raises AdapterNotFound, and as `cache_stats` does."""
        return await self._asked(lambda engine: engine.adapters.unmount(name))

    async def mounted(self) -> "Mapping[str, Mounted | AdapterError]":
        """The adapters by name, and what is wrong with those that are missing. Raises as `cache_stats` does."""
        return await self._asked(
            lambda engine: {each.name: each for each in engine.adapters.mounted} | engine.adapters.missing
        )

    async def draft_policy(self) -> DraftPolicy | None:
        """Whether drafting pays here, None where nobody drafts. Raises as `cache_stats` does."""
        return await self._asked(lambda engine: engine.drafts.policy())

    async def _asked(self, question: Callable[[Any], T]) -> T:
        await self.model()
        answered: asyncio.Future[T | MlxcelError] = asyncio.get_running_loop().create_future()

        def deliver(answer: T | MlxcelError) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._loop.ask(question, deliver)
        answer = await answered
        if isinstance(answer, MlxcelError):
            raise answer
        return answer

    def _post(self, deliver: Callable[[], None]) -> None:
        assert self._asyncio is not None, "the bridge was not started"
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to hear
            self._asyncio.call_soon_threadsafe(deliver)

    def _on_state(self) -> None:
        self._post(self._announce)

    def _announce(self) -> None:
        self._loaded.set()
        if self._loop.model is not None and self._loop.fault is None:
            for note in self._loop.model.notes:
                log.info(self._said, note)
            log.info(self._said, "ready to answer")
            self._on_loaded()
        if self._loop.fault is not None:
            self._on_fault(self._loop.fault)
