"""`gather_linear`: each row has the bits of `linear` with its expert's weight, whatever else is in the call."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchGLU

from engine.kernels import leaves, native
from tests.engine.kernels.weights import BITS, FLOATS, GROUP_SIZES, Weight, noise


class Experts:
    """`num_experts` weights of noise, alone and stacked."""

    def __init__(self, num_experts, *arguments, **options):
        self.alone = [Weight(*arguments, **options) for _ in range(num_experts)]
        self.arguments = {
            name: mx.stack([weight.arguments[name] for weight in self.alone])
            if isinstance(value, mx.array)
            else value
            for name, value in self.alone[0].arguments.items()
        }

    def product(self, x, indices):
        return np.array(native.gather_linear(mx.array(x), indices=mx.array(indices), **self.arguments))

    def expected(self, x, indices):
        """`linear` of each row of `x` `[tokens, 1 or choices, inputs]`, one after the other, and the error."""
        x = np.broadcast_to(x, (*indices.shape, x.shape[-1]))
        outputs, errors = [], []
        for expert, row in zip(indices.flatten(), x.reshape(-1, x.shape[-1]), strict=True):
            outputs.append(self.alone[expert].product(row[None])[0])
            errors.append(self.alone[expert].error(row, outputs[-1]))
        return np.array(outputs).reshape(*indices.shape, -1), max(errors, default=0)

    def check(self, rng, num_tokens, num_choices, num_inputs):
        """A token's row for all of its experts, and a row for each of them; together, and each token alone."""
        indices = chosen(rng, num_tokens, num_choices, len(self.alone))
        for rows_each in (1, num_choices):
            x = noise(rng, num_tokens, rows_each, num_inputs)
            expected, error = self.expected(x, indices)
            assert error < 1e-6
            assert np.array_equal(self.product(x[:, :, None], indices)[:, :, 0], expected)
            alone = self.product(x[-1:, :, None], indices[-1:])
            assert np.array_equal(alone[0, :, 0], expected[-1])


def chosen(rng, num_tokens, num_choices, num_experts):
    """Different experts for each token, as a router chooses them."""
    order = np.argsort(rng.random((num_tokens, num_experts)), axis=-1)
    return order[:, :num_choices].astype(np.uint32)


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_inputs", [1, 33, 96])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_plain_experts(level, rng, dtype, num_inputs, num_tokens):
    experts = Experts(5, rng, num_inputs, 37, dtype, with_bias=num_inputs % 2 == 1)
    experts.check(rng, num_tokens, 3, num_inputs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_packed_experts(level, rng, bits, group_size, dtype):
    experts = Experts(5, rng, 2 * group_size, 41, dtype, bits, group_size, with_bias=bits % 2 == 1)
    for num_tokens in (1, 3, 30):
        experts.check(rng, num_tokens, 3, 2 * group_size)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_any_number_of_threads_gives_the_same_bits(compiled, rng, bits):
    experts = Experts(6, rng, 256, 300, mx.float32, bits, 64 if bits else 0)
    for num_tokens in (1, 4, 33):
        x, indices, products = noise(rng, num_tokens, 1, 1, 256), chosen(rng, num_tokens, 2, 6), []
        for num_threads in (1, 2, 3):
            compiled.set_num_threads(num_threads)
            products += [experts.product(x, indices) for _ in range(5)]
        assert all(np.array_equal(product, products[0]) for product in products)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint8, np.int16])
def test_what_is_no_expert_gives_what_is_no_number(level, rng, dtype):
    experts = Experts(3, rng, 64, 9, mx.float32, 4, 32)
    strays = [3, 100, np.iinfo(dtype).max, np.iinfo(dtype).min if np.iinfo(dtype).min else 200]
    x, indices = noise(rng, 6, 1, 1, 64), np.array([[0], *[[stray] for stray in strays], [2]], dtype)
    product = experts.product(x, indices)
    assert np.isnan(product[1:5]).all()
    expected, _ = experts.expected(x[[0, 5], 0], indices[[0, 5]])
    assert np.array_equal(product[[0, 5], :, 0], expected)
    assert np.isnan(experts.product(x, np.full((6, 2), 7, dtype))).all()


@pytest.mark.parametrize(
    ("x", "indices"),
    [
        ((3, 1, 1, 2, 64), (3, 5, 4)),
        ((2, 5, 64), (1, 2)),
        ((2, 5, 64), (3, 1)),
        ((7, 64), (4,)),
        ((7, 64), ()),
        ((6, 1, 64), (6,)),
        ((0, 1, 1, 64), (0, 2)),
        ((2, 1, 1, 64), (2, 0)),
    ],
)
def test_axes_are_broadcast_as_mlx_does_it(level, rng, x, indices):
    experts = Experts(3, rng, 64, 9, mx.bfloat16)
    x, indices = noise(rng, *x), rng.integers(0, 3, indices).astype(np.uint32)
    weight = experts.arguments["weight"].astype(mx.float32)
    expected = mx.gather_mm(mx.array(x), weight.swapaxes(-1, -2), rhs_indices=mx.array(indices))
    product = experts.product(x, indices)
    assert product.shape == expected.shape
    assert np.allclose(product, np.array(expected), rtol=1e-4, atol=1e-4)


def test_arrays_that_do_not_lie_densely(level, rng):
    experts = Experts(4, rng, 64, 9, mx.float32, 4, 32)
    x, indices = noise(rng, 5, 2, 1, 64), chosen(rng, 5, 2, 4)
    expected = experts.product(x, indices)
    apart = mx.array(np.ascontiguousarray(x.transpose(3, 2, 1, 0))).transpose(3, 2, 1, 0)
    turned = mx.array(np.ascontiguousarray(indices.T)).T
    assert np.array_equal(np.array(native.gather_linear(apart, indices=turned, **experts.arguments)), expected)
    assert np.array_equal(experts.product(mx.array(x)[::2], indices[::2]), expected[::2])


def test_indices_that_are_not_computed_yet(compiled, rng):
    experts = Experts(8, rng, 64, 9, mx.float32, 4, 32)
    x = noise(rng, 4, 1, 1, 64)
    for _ in range(20):
        scores = noise(rng, 4, 8)
        late = mx.argpartition(mx.array(scores) * 2, kth=-2, axis=-1)[..., -2:]
        late_product = native.gather_linear(mx.array(x), indices=late, **experts.arguments)
        assert np.array_equal(np.array(late_product), experts.product(x, np.array(late)))


def test_every_output_is_written_where_the_memory_held_nan(compiled, rng):
    experts = Experts(4, rng, 96, 101, mx.float32)
    for _ in range(20):
        poison = mx.full((9, 2, 1, 101), float("nan"))
        mx.eval(poison)
        del poison
        assert np.isfinite(experts.product(noise(rng, 9, 1, 1, 96), chosen(rng, 9, 2, 4))).all()


def test_values_beyond_the_finite_stay_in_their_row(level, rng):
    experts = Experts(2, rng, 64, 9, mx.float32, 4, 64)
    x, indices = noise(rng, 6, 1, 1, 64), np.zeros((6, 1), np.uint32)
    expected = experts.product(x, indices)
    x[2, 0, 0, 5] = np.nan
    product = experts.product(x, indices)
    assert np.isnan(product[2]).all()
    assert np.array_equal(product[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("shapeless", [True, False])
def test_it_is_the_same_under_compile(compiled, rng, shapeless):
    experts = Experts(4, rng, 64, 9, mx.bfloat16, 4, 32, with_bias=True)
    under = mx.compile(
        lambda x, indices: native.gather_linear(x + 1, indices=indices, **experts.arguments) * 2,
        shapeless=shapeless,
    )
    for num_tokens in (1, 3):
        x, indices = noise(rng, num_tokens, 1, 1, 64), chosen(rng, num_tokens, 2, 4)
        assert np.array_equal(np.array(under(mx.array(x), mx.array(indices))), experts.product(x + 1, indices) * 2)


@pytest.mark.parametrize(
    ("x", "arguments", "said"),
    [
        ((2, 1, 64), {"weight": mx.zeros((4, 3, 32))}, "do not fit"),
        ((2, 1, 64), {"weight": mx.zeros((3, 64))}, "a weight of three axes"),
        ((64,), {"weight": mx.zeros((4, 3, 64))}, "a weight of three axes"),
        ((2, 1, 64), {"weight": mx.zeros((4, 3, 64)), "indices": mx.zeros((2,))}, "whole numbers"),
        ((2, 1, 64), {"weight": mx.zeros((4, 3, 64)), "indices": mx.zeros((3,), mx.int32)}, "broadcast"),
        ((2, 1, 64), {"weight": mx.zeros((4, 3, 64)), "bias": mx.zeros((3,))}, "one value for each output"),
        ((2, 1, 64), {"weight": mx.zeros((4, 3, 8), mx.uint32), "bits": 4, "group_size": 32}, "scales and biases"),
    ],
)
def test_what_does_not_fit_is_refused(compiled, x, arguments, said):
    with pytest.raises(ValueError, match=said):
        native.gather_linear(mx.zeros(x), **{"indices": mx.zeros((2,), mx.uint32)} | arguments)


@pytest.mark.parametrize("bits", [0, 4])
def test_a_block_of_experts_sorts_its_tokens_or_not(level, rng, bits):
    """mlx-lm sorts from 64 choices on: each token's bits are those of the token alone all the same."""
    block = SwitchGLU(64, 96, 8, bias=True)
    if bits:
        for name, layer in list(block.children().items()):
            if hasattr(layer, "to_quantized"):
                block[name] = layer.to_quantized(group_size=32, bits=bits)
    x, indices = mx.array(noise(rng, 1, 40, 64)), mx.array(chosen(rng, 40, 2, 8))[None]
    expected = block(x, indices)
    leaves.replace(block)
    assert leaves.is_compiled(block.gate_proj)
    whole = block(x, indices)
    assert mx.allclose(whole, expected, rtol=1e-4, atol=1e-5)
    for token in (0, 17, 39):
        alone = block(x[:, token : token + 1], indices[:, token : token + 1])
        assert mx.array_equal(alone[0, 0], whole[0, token])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bits=st.sampled_from((0, *BITS)),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(FLOATS),
    groups=st.integers(1, 4),
    num_outputs=st.integers(1, 100),
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    num_threads=st.integers(1, 3),
)
def test_any_shape(seed, bits, group_size, dtype, groups, num_outputs, num_tokens, num_experts, num_threads):
    if isinstance(native.start(num_threads), str):
        pytest.skip("kernels: portable")
    rng = np.random.default_rng(seed)
    num_inputs = groups * group_size + (0 if bits else seed % 7)
    experts = Experts(num_experts, rng, num_inputs, num_outputs, dtype, bits, group_size, with_bias=seed % 2 == 1)
    experts.check(rng, num_tokens, 1 + seed % num_experts, num_inputs)


def test_where_there_are_no_experts_nothing_is_a_number(compiled):
    product = native.gather_linear(mx.ones((2, 1, 8)), mx.zeros((0, 4, 8)), mx.array([0, -1]))
    assert product.shape == (2, 1, 4)
    assert mx.all(mx.isnan(product))
