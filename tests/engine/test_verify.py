"""Hits are computed again and compared: agreement is counted, a difference is said, and no row notices."""

import dataclasses
import logging
import queue

import pytest

from engine.cache.pages import PagedStorage
from engine.cache.prefix import BLOCK_TOKENS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.loop import EngineLoop
from engine.model.load import load
from engine.plan import PrefillPlan
from engine.request import Output, Request
from engine.verify import MAX_WAITING
from tests.engines import BACKENDS, Watched
from tests.serving import settle
from tests.tiny import write_checkpoint
from tests.zoo import zoo_loaded, zoo_model

PROMPT = tuple((7 * i + i // 9) % 250 for i in range(75))
REQUEST = Request("again", PROMPT, max_tokens=8, boundaries=(40, 75))


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models"), request.param)


def opened(model, rate=1.0, **config):
    return Watched(model, no_prompt_cache=False, verify_cache=rate, **config)


def verified(watched):
    """Numbers of hits checked and found different, when all that waits is done."""
    while watched.engine.verifier.has_work:
        watched.engine.verifier.advance()
    stats = watched.engine.cache_stats()
    return stats.verify_checked, stats.verify_different


def spoil(watched):
    """Have what is adopted from now on be wrong by little."""
    adopt = watched.engine.prompts.adopt

    def wrong(row, num_tokens, storage, **how):
        adopt(row, num_tokens, storage, **how)
        layer = storage.attention_layers()[-1]
        if isinstance(storage, PagedStorage):
            keys, place = layer.pool.keys, layer.table.numbers[0] * BLOCK_TOKENS
        else:
            keys, place = layer.stored()[0], 0
        keys[..., place : place + 1, :] = keys[..., place : place + 1, :] + 0.5

    watched.engine.prompts.adopt = wrong


@pytest.mark.parametrize("size", [0, 16, 50])
def test_a_right_hit_is_found_right_and_its_row_goes_on_as_without(folder, size):
    watched, plain = opened(folder, prefill_chunk_size=size), Watched(folder)
    expected = plain.alone(REQUEST)
    assert watched.alone(REQUEST) == expected
    assert verified(watched) == (0, 0)
    assert watched.alone(REQUEST) == expected
    assert verified(watched) == (1, 0)
    watched.engine.prompts.check()
    assert watched.engine.cache_stats().off_plan == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_hit_is_counted_and_said(folder, caplog, backend):
    watched = opened(folder, decode_storage_backend=backend)
    watched.alone(REQUEST)
    spoil(watched)
    watched.alone(dataclasses.replace(REQUEST, id="suspect"))
    with caplog.at_level(logging.ERROR, "engine.verify"):
        assert verified(watched) == (1, 1)
    adopted = 74 if backend == "paged" else 64
    assert f"request suspect: {adopted} adopted tokens of 75" in caplog.text
    assert "the first that of token" in caplog.text


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "recurrent_gemma", "deepseek_v3", "gemma2"])
def test_families_whose_prompts_are_cut_at_fixed_places(name):
    watched = opened(zoo_loaded(zoo_model(name)), prefill_chunk_size=32)
    expected = watched.alone(REQUEST)
    assert watched.alone(REQUEST) == expected
    assert verified(watched) == (1, 0)


def test_what_the_cold_plan_would_not_cut_is_counted():
    watched = opened(zoo_loaded(zoo_model("gemma2")), prefill_chunk_size=32)
    engine = watched.engine
    watched.alone(REQUEST)
    careless = PrefillPlan(held=lambda row, reproduces: engine.prompts.held(row, lambda hit: True))
    for plan, off_plan in ((engine.plan(), 0), (careless, 1)):
        row = engine.submit(dataclasses.replace(REQUEST, prompt=PROMPT[:60]))
        engine.prefill(plan.pieces([row], decoding=False))
        assert engine.cache_stats().off_plan == off_plan


def test_a_draw_is_drawn_again(folder):
    watched = opened(folder)
    request = dataclasses.replace(
        REQUEST, sampling=dataclasses.replace(REQUEST.sampling, temperature=1.0, seed=5, repetition_penalty=1.2)
    )
    for _ in range(3):
        watched.alone(request)
    assert verified(watched) == (2, 0)


@pytest.mark.parametrize(("rate", "checked"), [(0.0, 0), (0.1, 1), (0.25, 3), (0.5, 6), (0.75, 9), (1.0, 12)])
def test_the_sample_is_counted_and_not_drawn(folder, rate, checked):
    watched = opened(folder, rate)
    for _ in range(13):
        watched.alone(dataclasses.replace(REQUEST, max_tokens=1))
    assert verified(watched) == (checked, 0)


def test_what_waits_is_bounded_and_nothing_is_passed_over(folder):
    watched = opened(folder)
    for _ in range(3 * MAX_WAITING + 1):
        watched.alone(dataclasses.replace(REQUEST, max_tokens=1))
    assert watched.engine.cache_stats().verify_checked == 2 * MAX_WAITING
    assert verified(watched) == (3 * MAX_WAITING, 0)


def test_a_check_that_fails_ends_alone(folder, caplog):
    watched = opened(folder)
    for _ in range(3):
        watched.alone(REQUEST)
    run, faults = watched.engine._forward.run, [RuntimeError("made to fail")]

    def failing(spans):
        if faults:
            raise faults.pop()
        return run(spans)

    watched.engine._forward.run = failing
    assert verified(watched) == (1, 0)
    assert "could not be checked" in caplog.text


def test_the_loop_checks_when_it_is_idle(folder):
    config = EngineConfig(model=folder, verify_cache=1.0, prefill_chunk_size=16)
    idle = queue.Queue()
    loop = EngineLoop(config, open_engine=lambda c: Engine(load(c.model), c))
    stands = loop.metrics.stands

    def told(**numbers):
        stands(**numbers)
        if numbers["prompt_cache"].verify_checked == 2:
            idle.put(1)

    loop.metrics.stands = told
    loop.start()
    events = queue.Queue()
    for _ in range(3):
        loop.submit(REQUEST, events.put)
        while not (isinstance(event := events.get(timeout=20), Output) and event.finish_reason):
            pass
    idle.get(timeout=20)
    settle(loop)
    assert loop.numbers().prompt_cache.verify_different == 0
    loop.stop()


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_share(folder, rate):
    with pytest.raises(ConfigError, match="verify_cache"):
        EngineConfig(model=folder, verify_cache=rate)
