"""What rank 0 tells is all that another rank needs to run the same forwards over the same rows."""

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from engine.cache import adapter
from engine.config import EngineConfig
from engine.direct import DirectEngine
from engine.engine import Engine
from engine.model.load import load
from engine.plan import Tick
from engine.ranks.forward import Mirror, chosen
from engine.ranks.messages import Begin, Run
from engine.request import Request, Sampling
from tests.tiny import VOCAB_SIZE, write_checkpoint


@pytest.fixture(params=[("llama", False), ("gemma3_text", False), ("mamba2", False), ("llama", True)], ids=str)
def mirrored(request, tmp_path):
    """An engine whose forward is told, what it told, and the mirror that was told as it went."""
    family, in_turn = request.param
    folder = write_checkpoint(tmp_path / family, family)
    adapter.install_attention()
    mirror = Mirror(load_model(folder)[0], VOCAB_SIZE, in_turn=in_turn)
    told: list[Begin | Run] = []

    def tell(message):
        told.append(message)
        (mirror.begin if isinstance(message, Begin) else mirror.run)(message)

    def choose(known, model, vocab_size):
        return chosen(model, vocab_size, in_turn=in_turn, tell=tell, fail=lambda fault: None)

    config = EngineConfig(model=folder, no_prompt_cache=True, lookahead=False)
    engine = Engine(load(folder), config, choose_forward=choose)
    return engine, told, mirror


def stored(storage):
    return [array for array in storage.arrays() if array.size]


def test_the_mirror_stores_what_rank_0_stores(mirrored):
    engine, _, mirror = mirrored
    rows = [engine.submit(Request(str(n), tuple(range(n, n + 9)), max_tokens=50)) for n in (3, 30)]
    plan = engine.plan()
    for row in rows:
        while not row.prefilled:
            engine.prefill(plan.pieces([row], decoding=False))
    for _ in range(5):
        engine.run(Tick(decode=tuple(rows)))
    assert mirror.num_rows == 2
    for row, other in zip(rows, mirror._rows.values(), strict=True):
        assert row.storage.length == other.length == 9 + 5
        same = [mx.array_equal(a, b).item() for a, b in zip(stored(row.storage), stored(other), strict=True)]
        assert all(same)


def test_rows_that_have_ended_are_let_go_with_the_next_forward(mirrored):
    engine, told, mirror = mirrored
    rows = [engine.submit(Request(str(n), (n, 2, 3), max_tokens=50)) for n in range(3)]
    for row in rows:
        engine.prefill(engine.plan().pieces([row], decoding=False))
    numbers = [engine._forward._numbers[row.storage] for row in rows]
    engine.cancel(rows[0])
    engine.release(rows[1])
    assert mirror.num_rows == 3
    engine.step([rows[2]])
    assert told[-1].gone == numbers[:2]
    assert mirror.num_rows == 1


def test_draws_are_the_engines_alone(mirrored, tmp_path):
    engine, _, _ = mirrored
    request = Request("r", (1, 2, 3, 4), Sampling(temperature=1.0, seed=5), max_tokens=9)
    alone = Engine(load(engine.config.model), engine.config, verdict=engine.verdict)
    expected = [output.token for output in DirectEngine(alone).complete(request)]
    assert [output.token for output in DirectEngine(engine).complete(request)] == expected


def test_a_forward_that_fails_ends_the_ranks(mirrored, monkeypatch):
    engine, _, _ = mirrored
    faults = []
    monkeypatch.setattr(engine._forward, "_fail", faults.append)
    monkeypatch.setattr(engine._forward, "_tell", lambda message: None)
    row = engine.submit(Request("r", (1, 2, 3), max_tokens=9))
    monkeypatch.setattr(engine._forward.forward, "run", lambda spans: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.prefill(engine.plan().pieces([row], decoding=False))
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


def test_how_keys_are_stored_is_told(tmp_path):
    folder = write_checkpoint(tmp_path / "llama")
    told: list[Begin | Run] = []

    def choose(known, model, vocab_size):
        return chosen(model, vocab_size, in_turn=False, tell=told.append, fail=lambda fault: None)

    config = EngineConfig(model=folder, no_prompt_cache=True, lookahead=False, cache_dtype="bfloat16")
    engine = Engine(load(folder), config, choose_forward=choose)
    engine.prefill(engine.plan().pieces([engine.submit(Request("r", (1, 2), max_tokens=3))], decoding=False))
    tried = [message.mode for message in told if isinstance(message, Begin) and message.tries]
    assert tried == ["alone", "spans"]
    assert [message for message in told if isinstance(message, Begin)][-1] == Begin("spans", "bfloat16")
