"""The loop: faults, cancels and stops touch their own rows and nothing else."""

import builtins
import queue
import subprocess
import sys
import threading

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextLengthExceeded, EngineStopped, ModelError, ModelNotFound, QueueFull, StepFailed
from engine.loop import MAX_FAULTS_IN_A_ROW, EngineLoop, open_engine
from engine.model.load import load
from engine.request import Failed, Output, Request
from engine.sample.chain import sample
from tests.serving import settle
from tests.tiny import write_checkpoint

PATIENCE_S = 20


class Gate:
    """A sampler that can be made to wait or to raise."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.faults = 0
        self.threads = set()

    def __call__(self, logits, draws):
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.open.wait(PATIENCE_S)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("made to fail")
        return sample(logits, draws)

    def hold(self):
        """Let the loop run into the next step, and keep it there."""
        self.open.clear()
        while self.entered.acquire(blocking=False):
            pass
        assert self.entered.acquire(timeout=PATIENCE_S)


class Client:
    """Collects the events of one request."""

    def __init__(self, loop, name, num_new=8, prompt=(1, 2, 3)):
        self.events = queue.Queue()
        self.ticket = loop.submit(Request(name, prompt, max_tokens=num_new, ignore_eos=True), self.events.put)

    def end(self):
        """The last event, and the tokens before it."""
        tokens = []
        while True:
            event = self.events.get(timeout=PATIENCE_S)
            if isinstance(event, Output):
                tokens.append(event.token)
                if event.finish_reason:
                    return event, tokens
            elif isinstance(event, (Failed, Exception)):
                return event, tokens


def settled(loop):
    """The numbers, once nothing is live."""
    settle(loop)
    return loop.numbers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def loop(folder, gate):
    config = EngineConfig(model=folder, parallel=2, max_queue_depth=2)
    loop = EngineLoop(config, open_engine=lambda c: Engine(load(c.model), c, sampler=gate))
    loop.start()
    yield loop
    gate.open.set()
    loop.stop(PATIENCE_S)
    assert not loop.is_alive
    assert loop._num_live == 0
    assert not loop._tickets


def test_requests_run_to_their_end(loop):
    clients = [Client(loop, str(i)) for i in range(3)]
    answers = [client.end()[1] for client in clients]
    assert all(len(tokens) == 8 for tokens in answers)
    assert answers[0] == answers[1] == answers[2]


def test_a_full_queue_refuses_at_once_and_recovers(loop, gate):
    first = Client(loop, "first", 50)
    gate.hold()
    clients = [Client(loop, str(i), 2) for i in range(3)]
    with pytest.raises(QueueFull, match="4 requests"):
        Client(loop, "one too many")
    gate.open.set()
    for client in (first, *clients):
        assert client.end()[0].finish_reason == "length"
    assert Client(loop, "later").end()[0].finish_reason == "length"


def test_who_hears_of_an_end_finds_its_place_free(loop, gate):
    Client(loop, "first", 50)
    gate.hold()
    followed = queue.Queue()

    def follow(event):
        if isinstance(event, Output) and event.finish_reason:
            followed.put(Client(loop, "follows", 2))

    loop.submit(Request("followed", (1, 2, 3), max_tokens=2, ignore_eos=True), follow)
    clients = [Client(loop, str(i), 2) for i in range(2)]
    gate.open.set()
    for client in (followed.get(timeout=PATIENCE_S), *clients):
        assert client.end()[0].finish_reason == "length"


def test_a_fault_seen_from_outside_is_heard_though_the_thread_is_stuck(folder, gate):
    watched = []
    loop = EngineLoop(
        EngineConfig(model=folder, parallel=1),
        open_engine=lambda c: Engine(load(c.model), c, sampler=gate),
        guard=watched.append,
    )
    loop.start()
    first = Client(loop, "first", 50)
    gate.hold()
    waiting = Client(loop, "waits")
    [fail] = watched
    fail(EngineStopped("another rank has ended"))
    assert [str(client.end()[0]) for client in (first, waiting)] == ["another rank has ended"] * 2
    with pytest.raises(EngineStopped, match="another rank has ended"):
        Client(loop, "later")
    gate.open.set()
    loop.stop(PATIENCE_S)
    assert not loop.is_alive
    assert loop._num_live == 0


def test_a_failed_step_ends_its_rows_and_the_next_request_runs(loop, gate):
    gate.faults = 1
    event, _ = Client(loop, "fails").end()
    assert isinstance(event, Failed)
    assert isinstance(event.error, StepFailed)
    assert "made to fail" in str(event.error)
    assert Client(loop, "runs").end()[0].finish_reason == "length"


def test_a_failed_mixed_step_ends_the_rows_of_that_forward(folder, gate):
    config = EngineConfig(
        model=folder,
        parallel=3,
        kv_unified=True,
        mixed_step=32,
        prefill_chunk_size=16,
        no_prompt_cache=True,
    )
    ticks = []

    class Watching(Engine):
        def run(self, tick):
            ticks.append(tick)
            return super().run(tick)

    loop = EngineLoop(config, open_engine=lambda c: Watching(load(c.model), c, sampler=gate))
    loop.start()
    expected = [
        Client(loop, "alone", num_new, prompt).end()[1] for num_new, prompt in ((40, (1, 2)), (8, (3,) * 90))
    ]
    clients = [Client(loop, "runs", 40, (1, 2))]
    gate.hold()
    clients.append(Client(loop, "joins", 8, (3,) * 90))
    ticks.clear()
    gate.open.set()
    assert [client.end()[1] for client in clients] == expected
    mixed = [tick for tick in ticks if tick.prefill and tick.decode]
    assert [tick.prefill_tokens for tick in mixed] == [16, 16, 16, 16, 16, 10]
    numbers = settled(loop)
    assert (numbers.mixed_steps, numbers.completion_tokens) == (6, 96)
    clients = [Client(loop, "runs", 400, (1, 2))]
    gate.hold()
    clients.append(Client(loop, "joins", 8, (3,) * 3000))
    gate.open.set()
    gate.hold()
    assert [len(tick.rows) for tick in ticks if tick.prefill and tick.decode][-1] == len(ticks[-1].rows) == 2
    gate.faults = 1
    gate.open.set()
    assert all(isinstance(client.end()[0], Failed) for client in clients)
    assert Client(loop, "next", 40, (1, 2)).end()[1] == expected[0]
    loop.stop(PATIENCE_S)


def test_a_run_of_failures_ends_the_loop(folder, gate):
    states = queue.Queue()
    loop = EngineLoop(
        EngineConfig(model=folder),
        open_engine=lambda c: Engine(load(c.model), c, sampler=gate),
        on_state=lambda: states.put(1),
    )
    loop.start()
    gate.faults = MAX_FAULTS_IN_A_ROW
    for i in range(MAX_FAULTS_IN_A_ROW):
        assert isinstance(Client(loop, str(i)).end()[0], Failed)
    for _ in range(2):
        states.get(timeout=PATIENCE_S)
    assert isinstance(loop.fault, EngineStopped)
    with pytest.raises(EngineStopped, match="steps in a row failed"):
        Client(loop, "too late")


def test_a_cancelled_row_ends_and_its_neighbour_does_not(loop, gate):
    kept, dropped = Client(loop, "kept", 30), Client(loop, "dropped", 2000)
    gate.hold()
    loop.cancel(dropped.ticket)
    loop.cancel(dropped.ticket)
    gate.open.set()
    assert len(kept.end()[1]) == 30
    assert Client(loop, "next").end()[0].finish_reason == "length"


def test_a_request_cancelled_in_the_queue_never_runs(loop, gate):
    first = Client(loop, "first", 20)
    second = Client(loop, "second", 20)
    gate.hold()
    waiting = Client(loop, "waiting")
    loop.cancel(waiting.ticket)
    gate.open.set()
    first.end()
    second.end()
    assert waiting.events.empty()
    assert waiting.ticket.row is None or waiting.ticket.row.storage is None


def test_a_consumer_that_throws_ends_its_own_request_only(loop):
    def throw(event):
        raise ValueError("bad consumer")

    loop.submit(Request("bad", (1, 2), max_tokens=500, ignore_eos=True), throw)
    assert Client(loop, "good", 40).end()[0].finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_told_so(loop):
    event, _ = Client(loop, "long", prompt=(1,) * 5000).end()
    assert isinstance(event, ContextLengthExceeded)
    assert (event.prompt_tokens, event.context_tokens) == (5000, 4096 // 2)


def test_stopping_tells_everybody_who_waits(folder, gate):
    loop = EngineLoop(
        EngineConfig(model=folder, parallel=1),
        open_engine=lambda c: Engine(load(c.model), c, sampler=gate),
    )
    loop.start()
    clients = [Client(loop, str(i), 500) for i in range(3)]
    gate.hold()
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    while not loop._stopping:
        pass
    gate.open.set()
    stopper.join(PATIENCE_S)
    assert all(isinstance(client.end()[0], EngineStopped) for client in clients)
    assert loop._num_live == 0


def test_a_model_that_cannot_be_loaded_is_said_to_all(tmp_path):
    def refuse(config):
        raise ModelNotFound("no such model")

    loop = EngineLoop(EngineConfig(model=tmp_path), open_engine=refuse)
    client = Client(loop, "early")
    loop.start()
    assert isinstance(client.end()[0], ModelNotFound)
    assert loop._num_live == 0
    with pytest.raises(ModelNotFound):
        Client(loop, "late")


def test_where_mlx_has_no_backend_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    def importing(name, *arguments, **more):
        if name == "engine.engine":
            raise ImportError("libmlx.so: cannot open shared object file")
        return imported(name, *arguments, **more)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ModelError, match="MLX does not run here: libmlx") as raised:
        open_engine(EngineConfig(model=tmp_path))
    assert "mlxcel[cpu]" in raised.value.hint


def test_every_request_is_counted_once_by_its_outcome(loop, gate):
    first = Client(loop, "first", 50)
    gate.hold()
    dropped, *others = (Client(loop, str(i), 2) for i in range(3))
    with pytest.raises(QueueFull):
        Client(loop, "one too many")
    numbers = loop.numbers()
    assert (numbers.active_rows, numbers.queue_depth) == (1, 3)
    loop.cancel(dropped.ticket)
    gate.open.set()
    for client in (first, *others):
        client.end()
    Client(loop, "long", prompt=(1,) * 5000).end()
    gate.faults = 1
    Client(loop, "fails").end()
    numbers = settled(loop)
    assert numbers.requests == {
        "stop": 0,
        "length": 3,
        "cancelled": 1,
        "refused": 2,
        "failed": 1,
        "handed_over": 0,
    }
    assert numbers.completion_tokens == 54
    assert numbers.prompt_tokens == 3 * 3
    assert numbers.e2e_s.num_observed == 6
    assert numbers.ttft_s.num_observed == 3
    assert numbers.inter_token_s.num_observed == 51
    assert (numbers.active_rows, numbers.queue_depth, numbers.kv_bytes) == (0, 0, 0)


def test_slots_show_what_runs(loop, gate):
    clients = [Client(loop, name, 2000) for name in ("a", "b", "c")]
    for client in clients[:2]:
        while not isinstance(client.events.get(timeout=PATIENCE_S), Output):
            pass
    gate.hold()
    slots = loop.slots()
    assert [slot.request.id for slot in slots] == ["a", "b"]
    assert [slot.task for slot in slots] == [0, 1]
    for slot in slots:
        assert slot.stored_tokens == 3
        assert slot.decoded_tokens + slot.remaining_tokens == 2000
    assert loop.numbers().kv_bytes > 0
    for client in clients:
        loop.cancel(client.ticket)
    gate.open.set()
    settled(loop)
    assert loop.slots() == [None, None]


def test_silence_is_measured_while_work_is_in_flight_and_nothing_comes_of_it(folder, gate):
    now_s = [100.0]
    loop = EngineLoop(
        EngineConfig(model=folder),
        open_engine=lambda c: Engine(load(c.model), c, sampler=gate),
        clock=lambda: now_s[0],
    )
    loop.start()
    Client(loop, "first").end()
    settled(loop)
    now_s[0] += 1000
    assert loop.silent_s() == 0
    client = Client(loop, "second", 50)
    gate.hold()
    now_s[0] += 7
    assert loop.silent_s() == 7
    gate.open.set()
    client.end()
    settled(loop)
    assert loop.silent_s() == 0
    loop.stop(PATIENCE_S)


def test_one_thread_loads_and_steps(loop, gate):
    Client(loop, "r").end()
    assert gate.threads == {loop._thread._thread.ident}


def test_questions_are_answered_between_steps(loop, gate):
    client = Client(loop, "r", 30)
    gate.hold()
    answers = queue.Queue()
    for question in (lambda engine: engine.num_slots, lambda engine: 1 / 0, lambda engine: "still here"):
        loop.ask(question, answers.put)
    assert answers.empty()
    gate.open.set()
    assert answers.get(timeout=PATIENCE_S) == 2
    assert isinstance(answers.get(timeout=PATIENCE_S), StepFailed)
    assert answers.get(timeout=PATIENCE_S) == "still here"
    assert len(client.end()[1]) == 30


def test_a_question_that_nobody_will_answer_is_told_so(folder):
    def refuse(config):
        raise ModelNotFound("no such model")

    loop = EngineLoop(EngineConfig(model=folder), open_engine=refuse)
    answers = queue.Queue()
    loop.ask(lambda engine: engine.num_slots, answers.put)
    loop.start()
    assert isinstance(answers.get(timeout=PATIENCE_S), ModelNotFound)
    with pytest.raises(ModelNotFound):
        loop.ask(lambda engine: engine.num_slots, answers.put)


def test_what_a_cancelled_row_has_stored_is_kept(loop, gate):
    prompt = tuple(range(100))
    client = Client(loop, "leaves", 500, prompt)
    gate.hold()
    loop.cancel(client.ticket)
    gate.open.set()
    event, _ = Client(loop, "stays", 2, prompt).end()
    assert event.timings.cache_n == 96


def test_what_expires_while_nothing_runs_is_dropped_then(folder):
    """Nobody has to ask for it."""
    expired = threading.Event()

    def open_engine(config):
        engine = Engine(load(config.model), config)
        engine.prompts._tree._ttl_s = 0.1
        return engine

    loop = EngineLoop(EngineConfig(model=folder), open_engine=open_engine)
    stands = loop.metrics.stands

    def told(*, prompt_cache, **numbers):
        stands(prompt_cache=prompt_cache, **numbers)
        if prompt_cache.expirations == 4:
            expired.set()

    loop.metrics.stands = told
    loop.start()
    Client(loop, "r", 2, tuple(range(70))).end()
    assert expired.wait(PATIENCE_S)
    assert loop.numbers().prompt_cache.num_bytes == 0
    loop.stop(PATIENCE_S)


def test_loading_leaves_the_bound_on_open_files_alone(folder):
    """mlx-lm lowers it when it is imported, to less than a busy server needs."""
    program = f"""
import resource
before = resource.getrlimit(resource.RLIMIT_NOFILE)
from pathlib import Path
from engine.config import EngineConfig
from engine.loop import open_engine
open_engine(EngineConfig(model=Path({str(folder)!r})))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


ENDS = {
    "stopped": "ended.wait()\nloop.stop()",
    "stopped while it runs": "begun.wait()\nloop.stop()",
    "while it loads": "",
    "while it runs": "begun.wait()",
    "when it is idle": "ended.wait()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_exits_cleanly_whatever_its_loop_does(folder, end):
    """MLX aborts a process whose interpreter ends under a thread that evaluates, or has only just ended."""
    program = f"""
import threading
from pathlib import Path
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.request import Request
begun, ended = threading.Event(), threading.Event()
def hear(event):
    begun.set()
    if getattr(event, "finish_reason", None):
        ended.set()
loop = EngineLoop(EngineConfig(model=Path({str(folder)!r})))
loop.start()
loop.submit(Request("r", (1, 2, 3), max_tokens=200, ignore_eos=True), hear)
{ENDS[end]}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
