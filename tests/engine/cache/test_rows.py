"""Dense storage: positions are kept in order, and a window forgets what nobody can see."""

import mlx.core as mx
import numpy as np
import pytest

from engine.cache.dtype import BY_NAME, chosen
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


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_are_rounded_and_never_infinite(dtype):
    keys = mx.array([1.0, 1 + 2**-12, 65504.0, 65519.0, 65520.0, -1e30, 3.4e38, float("nan")])[None, None, :, None]
    layer = DenseLayer(FULL, dtype)
    layer.append(keys[..., :3, :], -keys[..., :3, :])
    layer.append(keys[..., 3:, :], -keys[..., 3:, :])
    stored, negative = (np.array(array.astype(mx.float32))[0, 0, :, 0] for array in layer.view(0))
    assert layer.view(0)[0].dtype == dtype
    assert np.array_equal(stored, -negative, equal_nan=True)
    assert np.isfinite(stored[:-1]).all()
    assert np.isnan(stored[-1])
    most = {mx.float16: 65504.0, mx.bfloat16: 3.3895313892515355e38}[dtype]
    assert stored[:2].tolist() == [1, 1]
    assert stored[6] == most
    assert stored[5] == max(-most, np.array(mx.array(-1e30).astype(mx.bfloat16).astype(mx.float32)))


def test_halves_take_half_the_room():
    sizes = {}
    for name, dtype in BY_NAME.items():
        layer = DenseLayer(FULL, dtype)
        fill(layer, [100])
        sizes[name] = sum(array.nbytes for array in layer.arrays())
    assert sizes["float32"] == 2 * sizes["float16"] == 2 * sizes["bfloat16"]


def test_what_auto_stands_for():
    assert chosen("auto", compiled=True) == mx.float16
    assert chosen("auto", compiled=False) is None
    assert [chosen(name, compiled=False) for name in BY_NAME] == list(BY_NAME.values())
