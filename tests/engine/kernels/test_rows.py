"""RMSNorm, the rotary embedding and SwiGLU against float64, each row's bits its own."""

import mlx.core as mx
import numpy as np
import pytest

from engine.kernels import native

ROWS = (1, 2, 3, 9, 33)


@pytest.fixture
def rng():
    return np.random.default_rng()


def noise(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def assert_close(output, wanted, tolerance=1e-5):
    assert np.abs(np.array(output) - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("length", [1, 15, 16, 33, 576, 1000])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(level, rng, length, weighted):
    x, weight = noise(rng, max(ROWS), length), noise(rng, length)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5) * (weight if weighted else 1)
    given = mx.array(weight) if weighted else None
    whole = native.rms_norm(mx.array(x), given, 1e-5)
    assert_close(whole, wanted)
    for count in ROWS:
        assert mx.array_equal(native.rms_norm(mx.array(x[-count:]), given, 1e-5), whole[-count:])
    turned = mx.array(np.ascontiguousarray(x.T)).T
    assert mx.array_equal(native.rms_norm(turned, given, 1e-5), whole)


def rotated(x, dims, traditional, speeds, scale, offsets):
    """`x` `[B, H, L, D]` in float64."""
    positions = (np.array(offsets)[:, None] + np.arange(x.shape[2])) * scale
    angles = positions[:, None, :, None] * speeds
    out = x.astype(np.float64)
    pairs = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(dims // 2), slice(dims // 2, dims))
    a, b = (x[..., pair].astype(np.float64) for pair in pairs)
    out[..., pairs[0]] = a * np.cos(angles) - b * np.sin(angles)
    out[..., pairs[1]] = a * np.sin(angles) + b * np.cos(angles)
    return out


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("dims", [8, 20, 64])
@pytest.mark.parametrize("with_freqs", [True, False])
def test_rope(level, rng, traditional, dims, with_freqs):
    x, offsets = noise(rng, 5, 3, 4, 64), [0, 7, 100, 3, 40]
    freqs = np.exp(rng.uniform(0, 5, dims // 2)).astype(np.float32) if with_freqs else None
    speeds = 1 / freqs.astype(np.float64) if with_freqs else 1e4 ** (-np.arange(dims // 2) / (dims // 2))
    how = dims, traditional, None if with_freqs else 1e4, 0.5
    given = mx.array(freqs) if with_freqs else None
    whole = native.rope(mx.array(x), *how, mx.array(offsets, mx.int32), given)
    assert_close(whole, rotated(x, dims, traditional, speeds, 0.5, offsets), 2e-5)
    for i, offset in enumerate(offsets):
        one = native.rope(mx.array(x[i : i + 1]), *how, offset, given)
        assert mx.array_equal(one, whole[i : i + 1])
        token = native.rope(mx.array(x[i : i + 1, :, 2:3]), *how, offset + 2, given)
        assert mx.array_equal(token, whole[i : i + 1, :, 2:3])
    apart = mx.array(np.ascontiguousarray(x.transpose(3, 2, 0, 1))).transpose(2, 3, 1, 0)
    assert mx.array_equal(native.rope(apart, *how, mx.array(offsets, mx.int32), given), whole)


@pytest.mark.parametrize("length", [1, 15, 16, 1536, 1537])
def test_swiglu(level, rng, length):
    gate, x = 6 * noise(rng, max(ROWS), length), noise(rng, max(ROWS), length)
    gate[0, 0], gate[1, 0] = 200, -200
    wide = gate.astype(np.float64)
    whole = native.swiglu(mx.array(gate), mx.array(x))
    assert_close(whole, wide / (1 + np.exp(-wide)) * x, 1e-6)
    for count in ROWS:
        assert mx.array_equal(native.swiglu(mx.array(gate[-count:]), mx.array(x[-count:])), whole[-count:])


def test_what_is_not_a_number_stays_so(level):
    nan = mx.array([[float("nan"), 1.0]])
    assert mx.isnan(native.rms_norm(nan, None, 1e-5)).all()
    assert mx.isnan(native.swiglu(nan, mx.ones((1, 2)))).tolist() == [[True, False]]


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_nothing_in_is_nothing_out(compiled, shape):
    x = mx.zeros(shape)
    assert native.rms_norm(x, None, 1e-5).shape == native.swiglu(x, x).shape == x.shape
    if len(shape) == 3:
        assert native.rope(x, 64, False, 1e4, 1.0, 0).shape == x.shape


def test_frequencies_that_are_not_computed_yet(compiled, rng):
    x = mx.array(noise(rng, 1, 2, 3, 64))
    for _ in range(20):
        values = np.exp(rng.uniform(0, 5, 32)).astype(np.float32)
        expected = native.rope(x, 64, False, None, 1.0, 3, mx.array(values))
        late = native.rope(x, 64, False, None, 1.0, mx.array(1) + 2, -(mx.array(-values) * 1))
        assert mx.array_equal(late, expected)
