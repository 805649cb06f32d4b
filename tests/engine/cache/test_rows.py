"""Dense storage: positions are kept in order, and a window forgets what nobody can see."""

import mlx.core as mx
import pytest

from engine.cache.kinds import LayerKind
from engine.cache.rows import GROWTH_TOKENS, DenseLayer

FULL = LayerKind("full")


def numbered(start, stop):
    """Keys whose numbers are their positions: `[1, 1, n, 1]`."""
    return mx.arange(start, stop).astype(mx.float32)[None, None, :, None]


def fill(layer, sizes):
    at = 0
    for size in sizes:
        layer.append(numbered(at, at + size), -numbered(at, at + size))
        at += size
    return at


@pytest.mark.parametrize("sizes", [[1] * 600, [600], [255, 1, 1, 343], [3, 500, 97]])
def test_a_full_layer_keeps_everything_in_order(sizes):
    layer = DenseLayer(FULL)
    stored = fill(layer, sizes)
    keys, values = layer.view(0)
    assert mx.array_equal(keys, numbered(0, stored))
    assert mx.array_equal(values, -numbered(0, stored))
    assert mx.array_equal(layer.view(590)[0], numbered(590, stored))


@pytest.mark.parametrize("sizes", [[1] * 1200, [700, 1, 1, 300, 198], [5] * 240])
def test_a_windowed_layer_keeps_the_window_in_bounded_room(sizes):
    window = 8
    layer = DenseLayer(LayerKind("window", window))
    at = 0
    for size in sizes:
        layer.append(numbered(at, at + size), numbered(at, at + size))
        first = max(0, at + 1 - window)  # what the first of these tokens sees
        assert mx.array_equal(layer.view(first)[0], numbered(first, at + size))
        at += size
    assert layer.arrays()[0].shape[2] <= max(sizes) + window + GROWTH_TOKENS


def test_what_has_left_the_window_cannot_be_asked_for():
    layer = DenseLayer(LayerKind("window", 8))
    fill(layer, [1] * 600)
    with pytest.raises(AssertionError, match="left the window"):
        layer.view(0)


def test_an_empty_layer_has_no_arrays():
    assert DenseLayer(FULL).arrays() == []
