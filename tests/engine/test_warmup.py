"""Warm-ups: what is stored by them, what is not, and what a fault costs."""

from dataclasses import replace

import pytest

from engine.request import Request
from engine.warmup import MAX_WAITING, WarmUps
from tests.engines import Watched, drive

PROMPT = tuple((7 * i + 3) % 250 for i in range(80))


@pytest.fixture
def engine(tiny):
    return Watched(tiny, no_prompt_cache=False).engine


def run(warm_ups):
    while warm_ups.has_work:
        warm_ups.advance()


def test_all_but_the_last_token_is_there_and_nothing_is_counted(engine):
    warm_ups = WarmUps(engine, engine.plan())
    warm_ups.add([Request("next", PROMPT)])
    run(warm_ups)
    stats = engine.cache_stats()
    assert (stats.hits, stats.misses, stats.tokens_reused) == (0, 0, 0)
    engine.memory.check()
    engine.prompts.check()
    _, [row] = drive(engine, [Request("r", (*PROMPT, 1, 2), max_tokens=2, ignore_eos=True)])
    assert row.num_cached >= (len(PROMPT) - 1) // 16 * 16


def test_the_newest_go_first_and_only_so_many_wait(engine):
    warm_ups = WarmUps(engine, engine.plan())
    submitted = []
    submit = engine.submit
    engine.submit = lambda request: submitted.append(request.id) or submit(request)
    warm_ups.add(Request(f"{number}", PROMPT) for number in range(MAX_WAITING + 2))
    run(warm_ups)
    assert submitted == [f"{number}" for number in reversed(range(2, MAX_WAITING + 2))]


def test_what_can_never_be_stored_is_passed_over(engine):
    warm_ups = WarmUps(engine, engine.plan())
    warm_ups.add([Request("short", PROMPT), Request("long", PROMPT * 1000)])
    run(warm_ups)
    assert engine.cache_stats().num_bytes > 0


def test_a_fault_ends_it_alone(engine, caplog):
    warm_ups = WarmUps(engine, engine.plan())
    warm_ups.add([Request("next", PROMPT)])

    def fails(pieces):
        raise RuntimeError("no")

    prefill, engine.prefill = engine.prefill, fails
    run(warm_ups)
    assert "could not be prepared" in caplog.text
    engine.prefill = prefill
    engine.memory.check()
    outputs, _ = drive(engine, [replace(Request("r", PROMPT), max_tokens=2, ignore_eos=True)])
    assert len(outputs[0]) == 2
