"""A vector alone equals that in a batch, in pieces, beside rows that decode, and of a row that was preempted.

Bit for bit; the zoo's families, some of which depend on the cut, are in `test_zoo.py`.
"""

import numpy as np
import pytest

from engine.cache.ledger import Unbounded
from engine.plan import PrefillPlan, Tick
from engine.request import Embedded
from engine.scheduler import Scheduler
from tests.embedded import POOLINGS, asked, hidden, vectors
from tests.engines import Watched
from tests.tiny import write_checkpoint
from tests.zoo import zoo_engine, zoo_model

LENGTHS = (1, 7, 40, 23)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_in_a_batch(watched, pooling):
    requests = [asked(watched, str(length), length, pooling) for length in LENGTHS]
    alone = [vectors(watched, [request])[0] for request in requests]
    assert all(map(np.array_equal, vectors(watched, requests), alone))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_in_any_pieces(watched, pooling):
    request = asked(watched, "cut", 40, pooling)
    [whole] = vectors(watched, [request])
    for size in range(1, 41):
        assert np.array_equal(vectors(watched, [request], size)[0], whole)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_beside_rows_that_decode_and_a_prompt(watched, pooling):
    """Pieces of a prompt that is continued, of one that is embedded and decode steps share forwards."""
    talk = [watched.request(name, length, 6, seed=length) for name, length in (("a", 5), ("b", 30))]
    request = asked(watched, "e", 40, pooling)
    expected, [vector] = [watched.alone(one) for one in talk], vectors(watched, [request])
    rows = [watched.engine.submit(one) for one in (*talk, request)]
    watched.store(rows[0], 100)
    plan = PrefillPlan(fixed_tokens=40, mixed_tokens=100)
    events = []
    while rows[2].finish_reason is None:
        prefilling = [row for row in (rows[2], rows[1]) if not row.prefilled]
        pieces = plan.pieces(prefilling, decoding=True)
        events += watched.engine.run(Tick(prefill=pieces, decode=(rows[0],)))
    [embedded] = [event for event in events if isinstance(event, Embedded)]
    assert np.array_equal(embedded.vector, vector)
    while rows[1].finish_reason is None:
        watched.store(rows[1], 100)
        watched.engine.step([rows[1]])
    assert [watched.finish(row) for row in rows[:2]] == expected


@pytest.mark.parametrize("pooling", POOLINGS)
def test_of_a_row_that_was_preempted(watched, pooling):
    request = asked(watched, "p", 40, pooling)
    [vector] = vectors(watched, [request])
    row, plan = watched.engine.submit(request), PrefillPlan(fixed_tokens=16)
    watched.engine.prefill(plan.pieces([row], decoding=False))
    watched.engine.run(Tick(preempt=(row,)))
    assert row.pooled is None
    events = []
    while row.finish_reason is None:
        events += watched.engine.prefill(plan.pieces([row], decoding=False))
    assert np.array_equal(events[-1].vector, vector)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral", "mamba2"])
def test_mlx_lm_has_the_same_hidden_states(name, pooling):
    watched = zoo_engine(name)
    request = asked(watched, "oracle", 20, pooling, normalizes=False)
    model = zoo_model(name)
    blocks = model.model if hasattr(model, "model") else model.backbone
    states = hidden(blocks, request.prompt)
    expected = states[-1] if pooling == "last" else states.mean(axis=0)
    [vector] = vectors(watched, [request])
    assert np.abs(vector - expected).max() <= 1e-5 * np.abs(expected).max()


def test_length_and_dimensions(watched):
    raw, unit, short = vectors(
        watched,
        [
            asked(watched, "raw", 9, normalizes=False),
            asked(watched, "unit", 9),
            asked(watched, "short", 9, num_dimensions=5),
        ],
    )
    assert np.allclose(unit, raw / np.linalg.norm(raw), rtol=1e-6)
    assert np.allclose(short, raw[:5] / np.linalg.norm(raw[:5]), rtol=1e-6)


def test_the_prompt_cache_is_left_alone(tmp_path):
    watched = Watched(write_checkpoint(tmp_path / "model"), no_prompt_cache=False)
    request = asked(watched, "again", 100, "mean")
    first, second = (vectors(watched, [request])[0] for _ in range(2))
    assert np.array_equal(first, second)
    stats = watched.engine.cache_stats()
    assert (stats.num_bytes, stats.hits, stats.misses) == (0, 0, 0)


def test_the_scheduler_lets_go_of_a_row_with_its_vector(watched):
    scheduler = Scheduler(PrefillPlan(fixed_tokens=16), num_slots=2, memory=Unbounded())
    rows = [watched.engine.submit(asked(watched, str(length), length)) for length in (40, 5, 9)]
    for row in rows:
        scheduler.add(row)
    while scheduler.has_work:
        scheduler.settle(watched.engine.run(scheduler.tick()))
        scheduler.check()
    assert [row.finish_reason for row in rows] == ["stop"] * 3
    assert not scheduler.rows
