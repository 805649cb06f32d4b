"""Five hundred requests of every kind: what the engine holds ends where it began."""

import gc
import os
import queue
import random
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.request import PRIORITIES, Output, Progress, Request, Sampling
from engine.size import Size
from tests.serving import settle
from tests.tiny import write_checkpoint

NUM_FIRST = 100  # until every buffer that is kept for later has been needed once
AT_ONCE = 12
PATIENCE_S = 60
SCALARS_BYTES = 128  # of functions that MLX compiles for each shape; a row has more
STATM = Path("/proc/self/statm")


class Soak:
    """Requests whose kinds follow from their numbers, so many at a time, and some that leave before their end."""

    def __init__(self, loop):
        self.loop = loop
        self.places = threading.Semaphore(AT_ONCE)
        self.outcomes = {"ended": 0, "left": 0, "failed": 0}

    def run(self, numbers):
        for number in numbers:
            assert self.places.acquire(timeout=PATIENCE_S)
            self.submit(number)
            if number % 50 == 0:
                assert (
                    self.asked(lambda engine: engine.prompts.check() or engine.prompts.stats()).num_bytes
                    <= self.loop.config.prompt_cache_bytes
                )
        settle(self.loop)

    def submit(self, number):
        kind = random.Random(number)
        owner, num_shared = kind.randrange(3), kind.choice([0, 20, 64])
        shared = [(7 * i + owner) % 250 for i in range(num_shared)]
        own = [kind.randrange(250) for _ in range(kind.choice([1, 5, 40, 200]))]
        prompt = (*shared, *own)
        request = Request(
            str(number),
            prompt,
            Sampling(temperature=kind.choice([0.0, 0.8]), seed=number, repetition_penalty=kind.choice([1.0, 1.2])),
            max_tokens=kind.choice([1, 6, 20]),
            ignore_eos=kind.random() < 0.8,
            priority=kind.choice(PRIORITIES),
            cache_prompt=kind.random() < 0.9,
            cache_salt=kind.choice(["", "", "mine"]),
            prompt_cache_key=kind.choice(["", "", "key"]),
            boundaries=tuple(sorted({len(shared), len(prompt)} - {0})),
        )
        leaves_after = kind.choice([0, 1, 4]) if kind.random() < 0.25 else -1
        seen = 0

        def hear(event):
            nonlocal seen
            seen += 1
            if seen == leaves_after:
                self.loop.cancel(ticket)
                self.over("left")
            elif isinstance(event, Output) and event.finish_reason is not None:
                self.over("ended")
            elif not isinstance(event, (Output, Progress)):
                self.over("failed")

        ticket = self.loop.submit(request, hear)
        if leaves_after == 0:
            self.loop.cancel(ticket)
            self.over("left")

    def over(self, outcome):
        self.outcomes[outcome] += 1
        self.places.release()

    def asked(self, question):
        answers = queue.Queue()
        self.loop.ask(question, answers.put)
        return answers.get(timeout=PATIENCE_S)

    def held(self):
        """Bytes of live arrays and of the process, with nothing kept for later."""

        def measure(engine):
            engine.prompts.reset()
            engine.prompts.check([])
            assert not any(engine.kv_blocks.values())
            assert engine.prompts.stats().num_bytes == engine.kv_bytes(()) == 0
            gc.collect()
            mx.clear_cache()
            return mx.get_active_memory(), resident_bytes()

        return self.asked(measure)


def resident_bytes():
    """What the process has in memory; 0 where the system does not tell in this way."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


@pytest.mark.parametrize(
    ("family", "num_requests", "budget"), [("gemma3_text", 500, "1MB"), ("mamba2", 150, "200kB")]
)
def test_live_arrays_and_resident_bytes_end_where_they_began(tmp_path, family, num_requests, budget):
    config = EngineConfig(
        model=write_checkpoint(tmp_path, family),
        parallel=4,
        prefill_chunk_size=64,
        prompt_cache_bytes=Size(budget),
        verify_cache=0.1,
    )
    loop = EngineLoop(config)
    loop.start()
    soak = Soak(loop)
    soak.run(range(NUM_FIRST))
    arrays, resident = soak.held()
    soak.run(range(NUM_FIRST, NUM_FIRST + num_requests))
    arrays_then, resident_then = soak.held()
    loop.stop(PATIENCE_S)
    stats = loop.numbers().prompt_cache
    assert soak.outcomes["failed"] == 0
    assert soak.outcomes["left"] > num_requests / 10
    assert stats.hits > num_requests / 10
    assert stats.evictions > 0
    assert stats.verify_checked > 0
    assert stats.verify_different == 0
    assert arrays_then - arrays < SCALARS_BYTES
    assert abs(resident_then - resident) <= 0.05 * resident
