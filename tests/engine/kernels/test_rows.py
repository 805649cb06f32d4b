"""Norms, the rotary embedding and activations against float64, each row's bits its own."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def layer_normed(x, weight, bias):
    """In float64, with 1e-5 added to the variance."""
    wide = x.astype(np.float64)
    apart = wide - wide.mean(axis=-1, keepdims=True)
    normed = apart / np.sqrt((apart**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed * (1 if weight is None else weight) + (0 if bias is None else bias)


def given_as(array):
    return None if array is None else mx.array(array)


@pytest.mark.parametrize("length", [1, 15, 16, 33, 576, 1000])
@pytest.mark.parametrize(("weighted", "biased"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm(level, rng, length, weighted, biased):
    x = noise(rng, max(ROWS), length) + 3
    weight, bias = noise(rng, length) if weighted else None, noise(rng, length) if biased else None
    how = given_as(weight), given_as(bias), 1e-5
    whole = native.layer_norm(mx.array(x), *how)
    assert np.abs(np.array(whole) - layer_normed(x, weight, bias)).max() <= 1e-5
    for count in ROWS:
        assert mx.array_equal(native.layer_norm(mx.array(x[-count:]), *how), whole[-count:])
    turned = mx.array(np.ascontiguousarray(x.T)).T
    assert mx.array_equal(native.layer_norm(turned, *how), whole)


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


def normal(v):
    """The integral of the normal distribution up to each value, in float64."""
    return np.vectorize(lambda one: math.erfc(-one / math.sqrt(2)) / 2)(v)


def logistic(v):
    return 1 / (1 + np.exp(-v))


GELUS = {
    "none": lambda v: v * normal(v),
    "tanh": lambda v: v * logistic(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)),
    "sigmoid": lambda v: v * logistic(1.702 * v),
}


def assert_each_close(output, wanted):
    """Within 1e-5 of every value by itself, as far as it is not next to nothing."""
    assert (np.abs(np.array(output) - wanted) / np.maximum(np.abs(wanted), 1e-20)).max() <= 1e-5


@pytest.mark.parametrize("length", [1, 15, 16, 1536, 1537])
@pytest.mark.parametrize("approximation", GELUS)
def test_gelu(level, rng, length, approximation):
    gate, x = 3 * noise(rng, max(ROWS), length), noise(rng, max(ROWS), length)
    gate[:6, 0] = 0, 30, -8, 1e-20, -1e-4, 1e4
    wanted = GELUS[approximation](gate.astype(np.float64))
    alone, product = (native.gelu(mx.array(gate), approximation, each) for each in (None, mx.array(x)))
    assert_each_close(alone, wanted)
    assert_each_close(product, wanted * x)
    assert mx.array_equal(alone * mx.array(x), product)
    for count in ROWS:
        assert mx.array_equal(native.gelu(mx.array(gate[-count:]), approximation), alone[-count:])
        together = native.gelu(mx.array(gate[-count:]), approximation, mx.array(x[-count:]))
        assert mx.array_equal(together, product[-count:])
    turned = [mx.array(np.ascontiguousarray(array.T)).T for array in (gate, x)]
    assert mx.array_equal(native.gelu(turned[0], approximation, turned[1]), product)
    assert mx.array_equal(native.gelu(turned[0], approximation), alone)


@pytest.mark.parametrize("approximation", GELUS)
def test_gelu_of_every_magnitude(level, approximation):
    values = np.concatenate([np.linspace(-12, 12, 200_001), np.geomspace(1e-30, 1e30, 10_000)]).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = GELUS[approximation](values.astype(np.float64))
    assert_each_close(native.gelu(mx.array(values), approximation), wanted)


@pytest.mark.parametrize("length", [1, 15, 16, 1537])
def test_clipped_swiglu(level, rng, length):
    gate, x = 6 * noise(rng, max(ROWS), length), 6 * noise(rng, max(ROWS), length)
    wide, other = np.minimum(gate, 7).astype(np.float64), np.clip(x, -7, 7).astype(np.float64)
    whole = native.clipped_swiglu(mx.array(gate), mx.array(x), 1.702, 7.0)
    assert_close(whole, wide * logistic(1.702 * wide) * (other + 1), 1e-6)
    for count in ROWS:
        one = native.clipped_swiglu(mx.array(gate[-count:]), mx.array(x[-count:]), 1.702, 7.0)
        assert mx.array_equal(one, whole[-count:])


def test_every_value_is_written_where_the_memory_held_nan(compiled, rng):
    x = mx.array(noise(rng, 9, 101))
    for _ in range(20):
        for function in (
            lambda x: native.layer_norm(x, None, None, 1e-5),
            native.gelu,
            lambda x: native.clipped_swiglu(x, x, 1.7, 7.0),
        ):
            poison = mx.full((9, 101), float("nan"))
            mx.eval(poison)
            del poison
            assert mx.isfinite(function(x)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    approximation=st.sampled_from(list(GELUS)),
    num_threads=st.integers(1, 3),
)
def test_any_shape(seed, shape, approximation, num_threads):
    if isinstance(native.start(num_threads), str):
        pytest.skip("kernels: portable")
    rng = np.random.default_rng(seed)
    x, weight, bias = noise(rng, *shape), noise(rng, shape[-1]), noise(rng, shape[-1])
    normed = native.layer_norm(mx.array(x), mx.array(weight), mx.array(bias), 1e-5)
    assert np.abs(np.array(normed) - layer_normed(x, weight, bias)).max() <= 1e-4
    assert_each_close(native.gelu(mx.array(x), approximation), GELUS[approximation](x.astype(np.float64)))


def test_what_is_not_a_number_stays_so(level):
    nan = mx.array([[float("nan"), 1.0]])
    assert mx.isnan(native.rms_norm(nan, None, 1e-5)).all()
    assert mx.isnan(native.layer_norm(nan, None, None, 1e-5)).all()
    other = mx.ones((1, 2))
    for output in (
        native.swiglu(nan, other),
        native.clipped_swiglu(nan, other, 1.7, 7.0),
        native.clipped_swiglu(other, nan, 1.7, 7.0),
        *(native.gelu(nan, approximation) for approximation in GELUS),
        *(native.gelu(other, approximation, nan) for approximation in GELUS),
    ):
        assert mx.isnan(output).tolist() == [[True, False]]


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_nothing_in_is_nothing_out(compiled, shape):
    x = mx.zeros(shape)
    assert native.rms_norm(x, None, 1e-5).shape == native.swiglu(x, x).shape == x.shape
    assert native.layer_norm(x, None, None, 1e-5).shape == native.gelu(x).shape == x.shape
    if len(shape) == 3:
        assert native.rope(x, 64, False, 1e4, 1.0, 0).shape == x.shape


def test_frequencies_that_are_not_computed_yet(compiled, rng):
    x = mx.array(noise(rng, 1, 2, 3, 64))
    for _ in range(20):
        values = np.exp(rng.uniform(0, 5, 32)).astype(np.float32)
        expected = native.rope(x, 64, False, None, 1.0, 3, mx.array(values))
        late = native.rope(x, 64, False, None, 1.0, mx.array(1) + 2, -(mx.array(-values) * 1))
        assert mx.array_equal(late, expected)


@pytest.mark.parametrize("length", [1, 7, 127, 128, 512, 1000, 49152])
def test_argmax_is_the_first_of_the_largest(level, length):
    values = np.random.default_rng().integers(-9, 9, (5, length)).astype(np.float32)
    values[2] = -np.inf
    values[3, length // 2] = np.inf
    x = mx.array(values)
    mx.eval(x)
    assert np.array_equal(np.array(native.argmax(x)), values.argmax(axis=-1))
    assert np.array_equal(np.array(native.argmax(x + 0)), values.argmax(axis=-1))


def test_argmax_of_what_is_not_a_number_is_a_place(level):
    x = mx.array(np.full((2, 600), np.nan, np.float32))
    mx.eval(x)
    assert all(0 <= place < 600 for place in native.argmax(x).tolist())
