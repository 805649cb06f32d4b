"""Every family of the zoo on the compiled kernels: what mlx-lm says, and rows together as each alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.kernels import leaves
from tests.engines import Watched
from tests.zoo import ZOO, zoo_engine, zoo_loaded, zoo_model

JOINS = {1: 3, 2: 9, 4: 20}


def logits(model):
    return np.array(model(mx.array([[5, 9, 20, 9, 77, 3, 4, 6, 100]]), cache=make_prompt_cache(model)))


@pytest.mark.parametrize("name", ZOO)
def test_compiled(compiled, name):
    model = zoo_model(name)
    expected = logits(model)
    leaves.replace(model)
    assert np.abs(logits(model) - expected).max() <= 1e-4 * np.abs(expected).max()
    plain = zoo_engine(name).engine
    watched = Watched(zoo_loaded(model), cache_dtype="float32" if plain._forward.stores else "auto")
    assert watched.engine.mode == plain.mode
    requests = {step: watched.request(f"{step}", length, 5, seed=step) for step, length in JOINS.items()}
    alone = [watched.alone(request) for request in requests.values()]
    kept = dict(watched.logits)
    watched.logits.clear()
    assert [row.output for row in watched.together(requests)] == alone
    assert all(np.array_equal(watched.logits[key], row) for key, row in kept.items())
