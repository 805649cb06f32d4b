"""`linear` against float64, and each row's bits whatever else is in the call."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native
from tests.engine.kernels.weights import BITS, FLOATS, GROUP_SIZES, Weight, noise

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 33)


def check(weight, rng, num_inputs):
    x = noise(rng, max(ROWS), num_inputs)
    whole = weight.product(x)
    assert weight.error(x, whole) < 1e-6
    for count in ROWS:
        assert np.array_equal(weight.product(x[-count:]), whole[-count:]), f"{count} rows"


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_inputs", [1, 31, 32, 33, 96, 577])
def test_plain_weights(level, rng, dtype, num_inputs):
    check(Weight(rng, num_inputs, 37, dtype, with_bias=num_inputs % 2 == 1), rng, num_inputs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_packed_weights(level, rng, bits, group_size, dtype):
    num_inputs = 3 * group_size
    check(Weight(rng, num_inputs, 41, dtype, bits, group_size, with_bias=bits % 2 == 1), rng, num_inputs)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_any_number_of_threads_gives_the_same_bits(compiled, level, rng, bits):
    weight = Weight(rng, 576, 300, mx.float32, bits, 64 if bits else 0)
    for count in (1, 4, 33):
        x, products = noise(rng, count, 576), []
        for num_threads in (1, 2, 3):
            compiled.set_num_threads(num_threads)
            products += [weight.product(x) for _ in range(5)]
        assert all(np.array_equal(product, products[0]) for product in products)


@pytest.mark.parametrize("bits", [0, 4, 6])
def test_inputs_that_do_not_lie_densely(level, rng, bits):
    weight = Weight(rng, 64, 9, mx.float32, bits, 32 if bits else 0)
    x = noise(rng, 5, 3, 64)
    expected = weight.product(x)
    turned = mx.array(np.ascontiguousarray(x.transpose(2, 1, 0))).transpose(2, 1, 0)
    assert np.array_equal(weight.product(turned), expected)
    assert np.array_equal(weight.product(mx.array(x)[::2, 1:]), expected[::2, 1:])
    assert np.array_equal(weight.product(mx.broadcast_to(mx.array(x[:1, :1]), (4, 2, 64)))[3, 1], expected[0, 0])
    assert np.array_equal(weight.product(x[0, 0]), expected[0, 0])


def test_weights_that_do_not_lie_densely(level, rng):
    w, x = noise(rng, 64, 7), mx.array(noise(rng, 2, 64))
    expected = native.linear(x, mx.array(np.ascontiguousarray(w.T)))
    assert mx.array_equal(native.linear(x, mx.array(w).T), expected)
    assert mx.array_equal(native.linear(x, (mx.array(w) + 0).T), expected)


def test_half_precision_inputs_are_widened(compiled, rng):
    weight = Weight(rng, 64, 9, mx.bfloat16)
    x = mx.array(noise(rng, 3, 64)).astype(mx.bfloat16)
    assert np.array_equal(weight.product(x), weight.product(x.astype(mx.float32)))


def test_nothing_in_is_nothing_out(level, rng):
    weight = Weight(rng, 64, 9, mx.float32, 4, 32)
    assert weight.product(np.zeros((0, 64), np.float32)).shape == (0, 9)
    assert native.linear(mx.zeros((2, 64)), mx.zeros((0, 64))).shape == (2, 0)


def test_every_output_is_written_where_the_memory_held_nan(compiled, rng):
    weight = Weight(rng, 577, 101, mx.float32)
    x = noise(rng, 9, 577)
    for _ in range(20):
        poison = mx.full((9, 101), float("nan"))
        mx.eval(poison)
        del poison
        assert np.isfinite(weight.product(x)).all()


def test_values_beyond_the_finite_stay_in_their_row(level, rng):
    weight = Weight(rng, 64, 9, mx.float32, 4, 64)
    x = noise(rng, 6, 64)
    expected = weight.product(x)
    x[2, 5], x[4, 6] = np.nan, np.inf
    product = weight.product(x)
    assert np.isnan(product[2]).all()
    assert not np.isfinite(product[4]).any()
    assert np.array_equal(product[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


def test_it_is_the_same_under_compile(compiled, rng):
    weight = Weight(rng, 64, 9, mx.bfloat16, 4, 32, with_bias=True)
    x = mx.array(noise(rng, 3, 64))
    compiled_product = mx.compile(lambda x: native.linear(x + 1, **weight.arguments) * 2)
    assert np.array_equal(np.array(compiled_product(x)), weight.product(x + 1) * 2)


@pytest.mark.parametrize(
    ("x", "arguments", "said"),
    [
        ((2, 64), {"weight": mx.zeros((3, 32))}, "do not fit"),
        ((2, 64), {"weight": mx.zeros((3, 64), mx.int32)}, "float32, float16 and bfloat16"),
        ((2, 64), {"weight": mx.zeros((3, 64)), "bias": mx.zeros((4,))}, "one value for each output"),
        ((2, 64), {"weight": mx.zeros((3, 8), mx.uint32), "bits": 4, "group_size": 32}, "scales and biases"),
        ((2, 64), {"weight": mx.zeros((3, 8), mx.uint32), "bits": 7, "group_size": 32}, "bits are"),
        ((2, 64), {"weight": mx.zeros((3, 8), mx.uint32), "bits": 4, "group_size": 16}, "groups are"),
    ],
)
def test_what_does_not_fit_is_refused(compiled, x, arguments, said):
    with pytest.raises(ValueError, match=said):
        native.linear(mx.zeros(x), **arguments)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bits=st.sampled_from((0, *BITS)),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(FLOATS),
    groups=st.integers(1, 9),
    num_outputs=st.integers(1, 140),
    num_rows=st.integers(1, 40),
    num_threads=st.integers(1, 3),
)
def test_any_shape(seed, bits, group_size, dtype, groups, num_outputs, num_rows, num_threads):
    if isinstance(native.start(num_threads), str):
        pytest.skip("kernels: portable")
    rng = np.random.default_rng(seed)
    num_inputs = groups * group_size + (0 if bits else seed % 7)
    weight = Weight(rng, num_inputs, num_outputs, dtype, bits, group_size, with_bias=seed % 2 == 1)
    x = noise(rng, num_rows, num_inputs)
    product = weight.product(x)
    assert weight.error(x, product) < 1e-6
    assert np.array_equal(weight.product(x[-1:]), product[-1:])


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32, mx.uint64, mx.int8], ids=str)
def test_ids_of_no_row_are_not_taken_for_others(compiled, dtype):
    """However many bits they have: 2**32 is not 0."""
    unsigned, size = dtype in (mx.uint32, mx.uint64), 2 ** (8 * dtype.size)
    ids = [1, 4, size - 1] if unsigned else [1, 4, size // 2 - 1, -1, -size // 2]
    ids += [2**32, 2**32 + 1] if dtype.size == 8 else []
    ids = mx.array(np.array(ids, str(dtype).removeprefix("mlx.core.")))
    rows = native.embed(ids, mx.ones((4, 8)))
    assert mx.all(rows[0] == 1)
    assert mx.all(mx.isnan(rows[1:]))
