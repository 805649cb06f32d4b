"""A prompt stored in any pieces equals the prompt stored at once, bit for bit."""

import numpy as np
import pytest


def assert_cut(watched, request, sizes):
    whole = watched.engine.submit(request)
    watched.logits.clear()
    watched.store(whole, 10_000)
    tokens, logits = watched.finish(whole), dict(watched.logits)
    for size in sizes:
        watched.logits.clear()
        cut = watched.engine.submit(request)
        watched.store(cut, size)
        assert watched.finish(cut) == tokens
        assert all(np.array_equal(watched.logits[key], expected) for key, expected in logits.items())


def test_any_cut(watched):
    assert_cut(watched, watched.request("cut", 40, 12, seed=2), range(1, 41))


def test_across_the_growth_of_the_storage(watched):
    assert_cut(watched, watched.request("long", 600, 8, seed=3), (1, 100, 255, 256, 257))


@pytest.mark.real
def test_real_model(real):
    assert_cut(real, real.request("cut", 24, 3, seed=4), (1, 7, 16))
