"""Rows whose keys and values lie in blocks of a pool equal rows with buffers of their own, bit for bit."""

import dataclasses
import logging

import numpy as np
import pytest

from engine.cache.blocks import RUN_BLOCKS
from engine.cache.prefix import BLOCK_TOKENS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kernels import leaves, native
from engine.plan import Piece
from engine.request import Sampling
from tests.engines import Watched
from tests.tiny import write_checkpoint
from tests.zoo import ZOO, zoo_loaded, zoo_model

# Plain and sliding windows, sinks, shared keys, latent keys, experts.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "gemma3n", "deepseek_v2", "qwen3_moe", "mimo_v2_flash")
DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


@pytest.fixture(autouse=True)
def _kernels():
    if isinstance(started := native.start(2), str):
        pytest.skip(f"kernels: portable ({started})")


def engines(name, **config):
    """A paged engine and a dense one over the same weights."""
    assert ZOO[name].mode == "spans"
    pair = []
    for backend in ("paged", "dense"):
        model = zoo_model(name)
        leaves.replace(model)
        pair.append(Watched(zoo_loaded(model), mode="spans", decode_storage_backend=backend, **config))
    return pair


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_any_length_joining_at_any_step(name, cache_dtype):
    paged, dense = engines(name, cache_dtype=cache_dtype)
    lengths = {1: 3, 5: 9, 20: 40, 21: 16}
    requests = {
        step: paged.request(f"joins at {step}", length, 30, seed=step, **DRAWN) for step, length in lengths.items()
    }
    rows, expected = paged.together(requests, piece=7), dense.together(requests)
    assert [row.output for row in rows] == [row.output for row in expected]
    assert paged.logits.keys() == dense.logits.keys()
    assert all(np.array_equal(paged.logits[key], logits) for key, logits in dense.logits.items())
    assert paged.engine.kv_blocks["held"] == 0
    paged.engine.prompts.check([])
    ways = {way for way, count in paged.engine.launches.items() if count}
    assert ways == {"paged_fused", "paged_recorded"}


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_window_holds_few_blocks_however_long_the_row(name):
    """And the pool has about as many as were held at once."""
    paged, _ = engines(name)
    request = paged.request("long", 200, 100)
    row = paged.engine.submit(request)
    paged.store(row, 32)
    paged.finish(row)
    windows, sizes = (
        paged.engine._forward.pages.windows,
        [len(blocks) for blocks in paged.engine._forward.pages.blocks],
    )
    assert windows == [0, 8]
    assert sizes == [2 * RUN_BLOCKS, RUN_BLOCKS]


def test_a_fault_of_one_row_changes_no_other_row(monkeypatch):
    """A forward that fails when it is built leaves the pools as they were."""
    paged, dense = engines("llama")
    good = paged.request("good", 20, 12)
    expected = dense.alone(good)
    row = paged.engine.submit(good)
    paged.store(row, 100)
    model = paged.engine._forward._model
    original = type(model).__call__

    def failing(self, *arguments, **options):
        original(self, *arguments, **options)
        raise RuntimeError("as the test says")

    for _ in range(3):
        paged.engine.step([row])
        bad = paged.engine.submit(paged.request("bad", 30, 5))
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "__call__", failing)
            with pytest.raises(RuntimeError):
                paged.engine.prefill([Piece(bad, 0, 30)])
        paged.engine.abandon()
        paged.engine.release(bad)
        paged.engine.prompts.check([row])
    assert paged.finish(row) == expected


def test_sixteen_rows_over_one_prompt_hold_it_once():
    paged, _ = engines("llama", no_prompt_cache=False, parallel=16, kv_unified=True)
    engine, plan = paged.engine, paged.engine.plan()
    rows = []
    for user in range(16):
        prompt = [(7 * i + 3) % 250 for i in range(512)] + [user] * 5
        request = dataclasses.replace(paged.request(str(user), 1, 4, seed=user), prompt=tuple(prompt))
        rows.append(engine.submit(request))
        while not rows[-1].prefilled:
            engine.prefill(plan.pieces([rows[-1]], decoding=False))
    engine.step(rows)
    engine.prompts.check(rows)
    unique = 512 + 16 * 6
    held = engine.kv_bytes(rows)
    of_token = held / (engine.kv_blocks["held"] * BLOCK_TOKENS) * len(engine._forward.pages.windows)
    assert held <= 1.3 * unique * of_token
    for row in rows:
        engine.cancel(row)
    engine.prompts.reset()
    assert engine.kv_blocks == {"held": 0, "cached": 0, "free": 0}


def test_which_storage_rows_have_is_said_and_chosen(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "m", "llama")

    def note(**config):
        engine = Engine.open(EngineConfig(model=folder, **config))
        return next(note for note in engine.notes if note.startswith("storage:"))

    assert note() == "storage: paged (blocks of 16 tokens)"
    assert note(parallel=1) == "storage: dense (one slot)"
    assert note(parallel=1, decode_storage_backend="paged") == "storage: paged (blocks of 16 tokens)"
    assert note(decode_storage_backend="dense") == "storage: dense (as asked)"
    assert note(portable=True) == "storage: dense (the compiled kernels do not attend)"
    with pytest.raises(ConfigError, match="cannot be paged: the compiled kernels do not attend"):
        note(portable=True, decode_storage_backend="paged")


def test_families_in_other_modes_are_dense():
    watched = Watched(zoo_loaded(zoo_model("mamba2")))
    assert watched.engine.kv_blocks == {}
    with pytest.raises(ConfigError, match="cannot be paged"):
        Watched(zoo_loaded(zoo_model("mamba2")), decode_storage_backend="paged")


def test_the_first_launch_of_each_way_is_logged(caplog):
    paged, dense = engines("llama")
    request = paged.request("r", 20, 8)
    with caplog.at_level(logging.INFO, "engine.launches"):
        for watched in (paged, dense):
            watched.alone(request)
            watched.alone(request)
    assert [record.getMessage() for record in caplog.records] == [
        "paged: fused launch (batch 1, 20 visible tokens)",
        "paged: recorded step (batch 1, 21 visible tokens)",
        "dense: fused launch (batch 1, 20 visible tokens)",
        "dense: recorded step (batch 1, 21 visible tokens)",
    ]


def test_what_the_kernel_does_not_take_is_laid_together(monkeypatch):
    """An option that the compiled attention lacks: the blocks are gathered, and each row goes by itself."""
    from engine.cache import attend

    paged, dense = engines("gemma3_text", cache_dtype="float32")
    requests = {1: paged.request("a", 20, 6), 3: paged.request("b", 40, 6, seed=1)}
    monkeypatch.setattr(attend.functions, "in_use", lambda: False)
    rows, expected = paged.together(requests, piece=9), dense.together(requests)
    assert [row.output for row in rows] == [row.output for row in expected]
    assert paged.engine.launches["paged_by_row"] > 0
    paged.engine.prompts.check([])


def test_seeds_draw_alike(tmp_path):
    paged, dense = engines("llama")
    request = dataclasses.replace(paged.request("r", 9, 20), sampling=Sampling(temperature=1.0, seed=5))
    assert paged.alone(request) == dense.alone(request)
