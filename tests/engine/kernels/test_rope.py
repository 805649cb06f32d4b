"""Every rotary embedding of mlx-lm's runs on the kernel, and says what it says without."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import deepseek_v2, hunyuan, internlm3, nanochat, rope_utils

from engine.kernels import functions, native
from tests.zoo.family import YARN

DIMS = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * (DIMS // 2),
    "long_factor": np.linspace(1, 8, DIMS // 2).tolist(),
}
DYNAMIC = {"type": "dynamic", "factor": 4.0}


def made(scaling=None, *, traditional=False, base=10000.0):
    return rope_utils.initialize_rope(DIMS, base, traditional, scaling, 2048)


class Negated:
    """Turned the other way round, as talkie does it."""

    def __call__(self, x, offset):
        freqs = -(10000.0 ** (mx.arange(0, DIMS, 2, dtype=mx.float32) / DIMS))
        return mx.fast.rope(x, dims=DIMS, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs)


VARIANTS = {
    "plain": made,
    "plain, traditional": lambda: made(traditional=True),
    "plain, an integral base": lambda: made(base=500000),
    "nn.RoPE as it is": lambda: nn.RoPE(DIMS),
    "linear": lambda: made({"type": "linear", "factor": 4.0}),
    "mrope": lambda: made({"type": "mrope", "mrope_section": [4, 6, 6]}),
    "llama3": lambda: made(LLAMA3),
    "llama3, traditional": lambda: made(LLAMA3, traditional=True),
    "yarn": lambda: made(YARN),
    "yarn, its magnitude scaled": lambda: made(YARN | {"factor": 4.0, "mscale": 2.0}, traditional=True),
    "longrope": lambda: made(LONG),
    "longrope, scaled by name": lambda: rope_utils.SuScaledRoPE(
        DIMS, original_max_position_embeddings=512, long_factor=LONG["long_factor"], long_mscale=1.3
    ),
    "proportional": lambda: made({"type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}),
    "proportional, traditional": lambda: made(
        {"type": "proportional", "partial_rotary_factor": 0.25}, traditional=True
    ),
    "dynamic": lambda: made(DYNAMIC),
    "deepseek_v2, yarn": lambda: deepseek_v2.DeepseekV2YarnRotaryEmbedding(DIMS, scaling_factor=4, mscale=2),
    "hunyuan, dynamic": lambda: hunyuan.DynamicNTKAlphaRoPE(DIMS, 10000.0, 1000.0),
    "internlm3, dynamic": lambda: internlm3.DynamicNTKScalingRoPE(DIMS, 64, scale=2.0),
    "nanochat": lambda: lambda x, offset: nanochat.apply_rotary_emb(x, offset),
    "talkie": Negated,
}
BASE_FOLLOWS_POSITION = {"dynamic", "internlm3, dynamic"}
WHOLE_HEAD = {"deepseek_v2, yarn", "nanochat"}


@pytest.fixture
def calls(compiled, monkeypatch):
    """The arguments that the kernel was called with, and what it gave."""
    made_calls, kernel = [], native.rope

    def rope(*arguments):
        made_calls.append((arguments, kernel(*arguments)))
        return made_calls[-1][1]

    monkeypatch.setattr(native, "rope", rope)
    functions._wrap_fast()
    return made_calls


def compiled_call(rope, *arguments, **options):
    before = functions._in_use.set(True)
    try:
        return rope(*arguments, **options)
    finally:
        functions._in_use.reset(before)


def expected(x, dims, traditional, base, scale, offset, freqs=None):
    """In float64, and how far float32 angles may lead from it: they are positions times speeds, both rounded."""
    x = np.array(x, np.float64)
    speeds = base ** (-np.arange(dims // 2) * 2 / dims) if freqs is None else 1 / np.array(freqs, np.float64)
    first = np.broadcast_to(np.array(offset, np.float64), x.shape[:1])
    positions = (first[:, None] + np.arange(x.shape[-2])) * scale
    angles = positions.reshape(-1, *[1] * (x.ndim - 3), x.shape[-2], 1) * speeds
    pairs = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(dims // 2), slice(dims // 2, dims))
    a, b = (x[..., pair] for pair in pairs)
    out, bound = x.copy(), np.full(x.shape, 1e-12)
    out[..., pairs[0]] = a * np.cos(angles) - b * np.sin(angles)
    out[..., pairs[1]] = a * np.sin(angles) + b * np.cos(angles)
    roundings = 2 - (np.log(speeds) if freqs is None else 0)
    for pair in pairs:
        bound[..., pair] = np.hypot(a, b) * (np.abs(angles) * 2.0**-23 * roundings + 1e-6)
    return out, bound


@pytest.mark.parametrize("offset", [0, 7, 5000, 100_000])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant(calls, name, offset):
    rope, rng = VARIANTS[name](), np.random.default_rng()
    for head_dim in {DIMS, DIMS if name in WHOLE_HEAD else 48}:
        x = mx.array(rng.standard_normal((2, 3, 4, head_dim)).astype(np.float32))
        offsets = (
            [offset]
            if name in BASE_FOLLOWS_POSITION
            else [offset, mx.array(offset), mx.array([offset, offset + 3])]
        )
        for positions in offsets:
            plain = rope(x, offset=positions)
            assert not calls
            output = compiled_call(rope, x, offset=positions)
            [(arguments, given)] = calls
            calls.clear()
            assert output is given
            wanted, bound = expected(*arguments)
            assert (np.abs(np.array(output) - wanted) <= bound).all()
            assert (np.abs(np.array(output) - np.array(plain)) <= 2 * bound).all()


@pytest.mark.parametrize("inverse", [True, False])
def test_yarn_turned_back_at_another_scale(calls, inverse):
    rope, x = made(YARN), mx.random.normal((1, 2, 4, DIMS))
    output = compiled_call(rope, x, offset=9, scale=0.25, inverse=inverse)
    assert len(calls) == 1
    assert mx.allclose(output, rope(x, offset=9, scale=0.25, inverse=inverse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5, DIMS), (3, 2, 5, DIMS), (3, 2, 2, 5, DIMS)])
def test_any_number_of_axes(calls, shape):
    rope, x, offsets = made(), mx.random.normal(shape), mx.array([4, 0, 1000])
    output = compiled_call(rope, x, offset=offsets)
    assert len(calls) == 1
    assert mx.allclose(output, rope(x, offset=offsets), rtol=1e-4, atol=1e-4)
    tokens = mx.swapaxes(mx.random.normal((3, 5, 2, DIMS)), 1, 2)
    assert mx.allclose(compiled_call(rope, tokens, offset=offsets), rope(tokens, offset=offsets), atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_other_types_go_on_to_mlx(calls, dtype):
    rope, x = made(), mx.random.normal((1, 2, 4, DIMS)).astype(dtype)
    assert mx.array_equal(compiled_call(rope, x, offset=3), rope(x, offset=3))
    assert not calls
