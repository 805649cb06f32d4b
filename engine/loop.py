"""One model's turns on the thread that touches MLX: mail in, tick, events out.

Others submit, cancel and stop from any thread and never see an array. The model is loaded in a turn too, since
what one thread has built another cannot evaluate. A loop decides nothing about rows (`scheduler.py`) and computes
nothing (`engine.py`); it contains faults: a forward that raises ends its own rows.
"""

import atexit
import contextlib
import functools
import itertools
import logging
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config import EngineConfig
from engine.errors import NO_BACKEND, EngineStopped, MlxcelError, ModelError, QueueFull, RequestError, StepFailed
from engine.handover import Arriving
from engine.metrics import Metrics, Numbers, Outcome, Times
from engine.plan import Tick
from engine.request import (
    PRIORITIES,
    Embedded,
    Event,
    Failed,
    Handed,
    Output,
    Progress,
    Request,
    Row,
)
from engine.scheduler import Scheduler
from engine.served import ServedModel, Slot
from engine.turns import MlxThread
from engine.warmup import MAX_WAITING, WarmUps
from engine.watch import Watch

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

MAX_FAULTS_IN_A_ROW = 5
T = TypeVar("T")


def open_engine(config: EngineConfig) -> "Engine":
    """Load MLX and the model; imported this late so that importing the loop costs nothing."""
    try:
        with limits_kept():
            from engine.engine import Engine
    except ImportError as fault:
        if "mlx" not in str(fault):
            raise
        raise ModelError(f"MLX does not run here: {fault}", hint=NO_BACKEND) from fault
    return Engine.open(config)


@contextlib.contextmanager
def limits_kept() -> Iterator[None]:
    """Importing mlx-lm lowers the process's bound on open files for good; a server needs one for each client."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


class Ticket:
    """One submitted request: hand it back to cancel it. Events reach `deliver`, on the loop's thread."""

    __slots__ = ("arriving", "deliver", "ended", "number", "request", "row", "times")

    def __init__(
        self,
        request: Request,
        deliver: Callable[[Event | MlxcelError], None],
        number: int,
        submitted_s: float,
        arriving: Arriving | None = None,
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.arriving = arriving
        self.number = number
        self.times = Times(submitted_s)
        self.row: Row | None = None
        self.ended = False


class EngineLoop:
    """Runs one engine. `post` is called once per tick with a function that delivers the tick's events.

    The default runs it at once; a server has it run on its own event loop, one wake-up for all rows. `guard` is
    given `fail` when the loop starts, for whoever sees from outside that it cannot go on. `clock` gives seconds
    and is what `metrics` are measured by. On `thread` it takes turns with others; without one it has its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        open_engine: Callable[[EngineConfig], "Engine"] = open_engine,
        post: Callable[[Callable[[], None]], None] = lambda deliver: deliver(),
        on_state: Callable[[], None] = lambda: None,
        guard: Callable[[Callable[[MlxcelError], None]], None] = lambda fail: None,
        clock: Callable[[], float] = time.perf_counter,
        thread: MlxThread | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.watch = Watch()
        self.model: ServedModel | None = None
        self.fault: MlxcelError | None = None
        self._open = open_engine
        self._post = post
        self._on_state = on_state
        self._guard = guard
        self._clock = clock
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None
        self._warm_ups: WarmUps | None = None
        self._task_numbers = itertools.count()
        self._progress_s = 0.0
        self._mail: deque[tuple[str, Ticket]] = deque()
        self._questions: deque[tuple[Callable[[Engine], Any], Callable[[Any], None]]] = deque()
        self._expected: deque[Request] = deque(maxlen=MAX_WAITING)
        self._own_thread = thread is None
        self._thread = thread or MlxThread()
        self._wake = self._thread.wake
        self._due_s = 0.0  # when it wants a turn though nothing comes
        self._started = False
        self._left = threading.Event()
        self._stopping = False
        self._num_live = 0
        self._num_slots = config.num_slots(batches=True)
        self._tickets: dict[Row, Ticket] = {}
        self._faults_in_a_row = 0

    @property
    def capacity(self) -> int:
        """How many requests may run and wait at once."""
        return self._num_slots + self.config.max_queue_depth

    @property
    def is_full(self) -> bool:
        """Whether a request that came now would be refused."""
        return self._num_live >= self.capacity

    def start(self) -> None:
        """Start loading; `on_state` is called when `model` or `fault` is set.

        A process that ends before `stop` was called stops at its exit: the interpreter kills threads that want it
        again by then, and C++ aborts when that happens within it.
        """
        atexit.register(self.stop)
        self._guard(self.fail)
        self._started = True
        self._thread.join(self)

    def stop(self, timeout_s: float | None = None) -> None:
        """End all rows and the turns, after the running step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        left = not self._started or self._left.wait(timeout_s)
        if left and (not self._own_thread or self._thread.wait(timeout_s)):
            atexit.unregister(self.stop)

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not left the thread."""
        return self._started and not self._left.is_set()

    def fail(self, fault: MlxcelError) -> None:
        """End all rows by `fault`, from any thread: the engine's own may never come back to hear of it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._die(fault)

    def submit(
        self,
        request: Request,
        deliver: Callable[[Event | MlxcelError], None],
        arriving: Arriving | None = None,
        *,
        is_accepted: bool = False,
    ) -> Ticket:
        """Enqueue `request`, which goes on from what is `arriving`, if it came with a state. `is_accepted`: it
        belongs to work that had a place before, and is not refused for want of one.

        Raises QueueFull or EngineStopped at once; later errors are delivered.
        """
        with self._wake:
            if self._stopping or self.fault is not None:
                raise self.fault or EngineStopped("the engine is stopping")
            if self._num_live >= self.capacity and not is_accepted:
                self.metrics.refused()
                raise QueueFull(
                    f"{self._num_live} requests run or wait already, and no more may "
                    f"(max_queue_depth {self.config.max_queue_depth})"
                )
            now_s = self._clock()
            if not self._num_live:
                self._progress_s = now_s
            self._num_live += 1
            ticket = Ticket(request, deliver, next(self._task_numbers), now_s, arriving)
            self.watch.queued(ticket, now_s)
            self._mail.append(("submit", ticket))
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the request after the running step; it gets no more events. Harmless when it has ended."""
        with self._wake:
            self._mail.append(("cancel", ticket))
            self._wake.notify()

    def ask(self, question: Callable[["Engine"], T], deliver: Callable[[T | MlxcelError], None]) -> None:
        """Have `question` answered by the engine's thread between two steps. Raises EngineStopped."""
        with self._wake:
            if self._stopping or self.fault is not None:
                raise self.fault or EngineStopped("the engine is stopping")
            self._questions.append((question, deliver))
            self._wake.notify()

    def warm_up(self, request: Request) -> None:
        """Store all of a prompt that is expected but its last token, when nothing else runs."""
        with self._wake:
            self._expected.append(request)
            self._wake.notify()

    def numbers(self) -> Numbers:
        """What was counted, and what stands now; from any thread."""
        numbers = self.metrics.read()
        numbers.at_s = self._clock()
        numbers.active_rows = sum(slot is not None for slot in self.slots())
        numbers.queue_depth = max(self._num_live - numbers.active_rows, 0)
        return numbers

    def slots(self) -> list[Slot | None]:
        """What each slot does now, None where it is free; from any thread."""
        if self._scheduler is None:
            return [None] * self._num_slots
        return [self._slot(row) for row in tuple(self._scheduler.slots)]

    def _slot(self, row: Row | None) -> Slot | None:
        ticket = self._tickets.get(row) if row is not None else None
        if row is None or ticket is None:
            return None
        decoded = len(row.output)
        stored = min(row.cursor, len(row.request.prompt))
        return Slot(ticket.number, row.request, stored, row.num_cached, decoded, row.limit_tokens - decoded)

    def silent_s(self) -> float:
        """How long work has been in flight without a token or a stored piece; 0 when there is none."""
        with self._wake:
            return self._clock() - self._progress_s if self._num_live else 0.0

    @property
    def is_called(self) -> bool:
        """Whether there is something to be looked at in its next turn."""
        return bool(self._mail or self._questions or self._expected or self._stopping)

    @property
    def due_s(self) -> float:
        return self._due_s

    @property
    def urgency(self) -> int:
        """That of the most urgent request."""
        tickets = [*self._tickets.values(), *(ticket for kind, ticket in self._mail if kind == "submit")]
        return min((PRIORITIES.index(ticket.request.priority) for ticket in tickets), default=len(PRIORITIES))

    def begin(self) -> bool:
        """Load the model; whether it is there."""
        if self._stopping:
            self._end_all(EngineStopped("the server is stopping"))
            return False
        try:
            engine = self._engine = self._open(self.config)
        except MlxcelError as fault:
            self._die(fault)
            return False
        except Exception as fault:
            log.exception("the model could not be loaded")
            self._die(EngineStopped(f"the model could not be loaded: {fault}"))
            return False
        self._num_slots = engine.num_slots
        self.model = ServedModel.of_engine(engine)
        scheduler = self._scheduler = Scheduler(
            engine.plan(),
            num_slots=engine.num_slots,
            max_batch_size=self.config.max_batch_size,
            grant_interval=self.config.prefill_grant_interval,
            memory=engine.memory,
            drafts=engine.drafts,
            preempts=self.config.enable_preemption,
        )
        self._warm_ups = WarmUps(engine, scheduler.plan)
        self._on_state()
        return True

    def turn(self) -> bool:
        """Take the mail and run one tick; whether there will be another turn."""
        engine, scheduler, warm_ups = self._engine, self._scheduler, self._warm_ups
        assert engine is not None, "a turn comes after the beginning"
        assert scheduler is not None, "it is made for the engine"
        assert warm_ups is not None, "they are made for the engine"
        try:
            return self._turn(engine, scheduler, warm_ups)
        except EngineStopped as fault:
            self._die(fault)
        except Exception as fault:
            log.exception("the engine's loop broke")
            self._die(EngineStopped(f"the engine's loop broke: {fault!r}"))
        return False

    def leave(self) -> None:
        """Let go of the engine, and of what it has of memory."""
        if self._engine is not None:
            self._engine.close()
        self.model = self._engine = self._scheduler = self._warm_ups = None
        self._left.set()

    def _turn(self, engine: "Engine", scheduler: Scheduler, warm_ups: WarmUps) -> bool:
        mail = self._take_mail()
        self._answer(engine)
        for kind, ticket in mail:
            if kind == "submit":
                self._admit(engine, scheduler, ticket)
            else:
                self._drop(engine, scheduler, ticket)
        if self._stopping:
            self._end_all(EngineStopped("the server is stopping"))
            return False
        if scheduler.has_work:
            warm_ups.leave()
        tick = scheduler.tick()
        if tick:
            events = self._run_tick(engine, scheduler, tick)
            scheduler.settle(events)
            happened = [(self._tickets[event.row], event) for event in events if event.row in self._tickets]
            self._count(tick, happened)
            self._deliver(happened)
        engine.verifier.advance()
        warm_ups.add(self._take_expected())
        if not scheduler.has_work:
            warm_ups.advance()
        if engine.adapters.num_leaving:
            in_use = (*scheduler.rows, *warm_ups.rows, *engine.verifier.rows)
            engine.adapters.settle(row.adapter for row in in_use)
        self.metrics.stands(
            kv_bytes=engine.kv_bytes((*scheduler.rows, *warm_ups.rows)),
            kv_blocks=engine.kv_blocks,
            launches=engine.launches,
            lookahead_steps=engine.lookahead_steps,
            prompt_cache=engine.cache_stats(),
            drafts=engine.drafts.stats(),
        )
        # What has expired in the prompt cache is dropped by who looks at it next.
        idle = not (scheduler.has_work or engine.verifier.has_work or warm_ups.has_work)
        self._due_s = time.monotonic() + engine.prompts.expires_in_s() if idle else 0.0
        return True

    def _take_mail(self) -> list[tuple[str, Ticket]]:
        with self._wake:
            mail = list(self._mail)
            self._mail.clear()
        return mail

    def _take_expected(self) -> list[Request]:
        with self._wake:
            expected = list(self._expected)
            self._expected.clear()
        return expected

    def _answer(self, engine: "Engine") -> None:
        """Answer what was asked so far."""
        while self._questions:
            question, deliver = self._questions.popleft()
            try:
                answer = question(engine)
            except MlxcelError as fault:
                answer = fault
            except Exception as fault:
                log.exception("a question to the engine failed")
                answer = StepFailed(f"the engine could not answer: {fault}")
            self._post(functools.partial(deliver, answer))

    def _admit(self, engine: "Engine", scheduler: Scheduler, ticket: Ticket) -> None:
        if ticket.ended:
            return
        try:
            row = engine.submit(ticket.request)
        except RequestError as error:
            self._deliver([(ticket, error)])
            return
        except Exception as fault:
            log.exception("request %s could not be opened", ticket.request.id)
            self._deliver([(ticket, StepFailed(f"the request could not be opened: {fault}"))])
            return
        ticket.row = row
        row.arriving, ticket.arriving = ticket.arriving, None
        self._tickets[row] = ticket
        scheduler.add(row)

    def _drop(self, engine: "Engine", scheduler: Scheduler, ticket: Ticket) -> None:
        if ticket.ended:
            return
        if ticket.row is not None:
            scheduler.remove(ticket.row)
            engine.cancel(ticket.row)
        self._end(ticket, "handed_over" if ticket.row and ticket.row.is_leaving else "cancelled")

    def _run_tick(self, engine: "Engine", scheduler: Scheduler, tick: Tick) -> Sequence[Event]:
        started_s = time.perf_counter()
        tickets = [self._tickets[row] for row in tick.rows if row in self._tickets]
        new, now_s = [ticket for ticket in tickets if ticket.times.started_s is None], self._clock()
        self.metrics.started([ticket.times for ticket in new], now_s)
        self.watch.started(new, now_s)
        try:
            events = engine.run(tick)
        except Exception as fault:
            log.exception("a step of %d rows failed", len(tick.rows))
            return self._fail(engine, tick, fault)
        self._faults_in_a_row = 0
        seconds = time.perf_counter() - started_s
        if tick.prefill:
            scheduler.plan.measured(tick.prefill_tokens + len(tick.decode), seconds)
        elif tick.decode:
            scheduler.drafts.measured(tick, seconds)
        return events

    def _fail(self, engine: "Engine", tick: Tick, fault: Exception) -> list[Event]:
        """End the rows of a failed call; after several in a row without success, end the loop."""
        self._faults_in_a_row += 1
        rows, events = engine.abandon()
        for row in {*tick.rows, *rows}:
            if row.finish_reason is None:
                engine.release(row)
                events.append(Failed(row, StepFailed(f"the step that ran this request failed: {fault}")))
        if self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
            self._deliver([(self._tickets[event.row], event) for event in events if event.row in self._tickets])
            raise EngineStopped(f"{self._faults_in_a_row} steps in a row failed, the last with: {fault}")
        return events

    def _count(self, tick: Tick, happened: Sequence[tuple[Ticket, Event]]) -> None:
        now_s = self._clock()
        if not all(isinstance(event, Failed) for _, event in happened):
            self._progress_s = now_s
        self.watch.ran(happened, [self._tickets[row] for row in tick.preempt if row in self._tickets], now_s)
        self.metrics.ran(tick, [(ticket.times, event) for ticket, event in happened], now_s)

    def _deliver(self, events: Sequence[tuple[Ticket, Event | MlxcelError]]) -> None:
        """Post the events of one tick; a consumer that throws ends its own request and nothing else."""
        if not events:
            return

        def deliver() -> None:
            for ticket, event in events:
                try:
                    ticket.deliver(event)
                except Exception:
                    log.exception("the consumer of request %s failed", ticket.request.id)
                    self.cancel(ticket)

        for ticket, event in events:  # first: who hears of an end may submit again at once, into the place it left
            if outcome := _outcome(event):
                self._end(ticket, outcome)
        self._post(deliver)

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        """Forget a request that has ended and give its place in the queue away."""
        if ticket.ended:
            return
        ticket.ended = True
        if ticket.row is not None:
            self._tickets.pop(ticket.row, None)
        now_s = self._clock()
        self.metrics.ended(outcome, ticket.times, now_s)
        self.watch.ended(ticket, outcome, now_s)
        with self._wake:
            self._num_live -= 1

    def _end_all(self, error: MlxcelError) -> None:
        with self._wake:
            waiting = [ticket for kind, ticket in self._mail if kind == "submit"]
            self._mail.clear()
            unanswered = list(self._questions)
            self._questions.clear()
        for _, deliver in unanswered:
            self._post(functools.partial(deliver, error))
        self._deliver([(ticket, error) for ticket in (*self._tickets.values(), *waiting) if not ticket.ended])

    def _die(self, fault: MlxcelError) -> None:
        """The loop ends by `fault`: everything that waits hears of it, and so does whoever watches."""
        with self._wake:
            self.fault = fault
        self._end_all(fault)
        self._on_state()


def _outcome(event: Event | MlxcelError) -> Outcome | None:
    """How a request has ended with `event`, or None: it goes on."""
    if isinstance(event, Output):
        return event.finish_reason
    if isinstance(event, Embedded):
        return "stop"
    if isinstance(event, RequestError):
        return "refused"
    return None if isinstance(event, (Progress, Handed)) else "failed"
