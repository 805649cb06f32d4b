"""Models' functions run on the kernels while a compiled model is called, and as ever for all others."""

import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchMLP

from engine.kernels import functions, leaves, native
from tests.zoo import zoo_model

TOKENS = mx.array([[5, 9, 20, 9, 77, 3, 4, 6, 100]])

# Which kernels a family's own functions come to.
FAMILIES = {
    "llama": {"rms_norm", "rope", "swiglu"},
    "gemma": {"rms_norm", "rope", "gelu"},
    "gemma2": {"rms_norm", "rope", "gelu"},
    "gemma3_text": {"rms_norm", "rope", "gelu"},
    "gemma3n": {"rms_norm", "rope", "gelu"},
    "gemma4_text": {"rms_norm", "rope", "gelu"},
    "gemma4_text, experts": {"rms_norm", "rope", "gelu"},
    "gpt2": {"layer_norm", "gelu"},
    "gpt_bigcode": {"layer_norm", "gelu"},
    "gpt_neox": {"layer_norm", "rope", "gelu"},
    "gptj": {"layer_norm", "rope", "gelu"},
    "gpt_oss": {"rms_norm", "rope", "clipped_swiglu"},
    "nemotron": {"layer_norm", "rope"},
    "phi": {"layer_norm", "rope", "gelu"},
    "phixtral": {"layer_norm", "rope", "gelu"},
    "qwen3_next": {"rms_norm", "rope", "swiglu"},
    "recurrent_gemma": {"rms_norm", "rope", "gelu"},
    "stablelm": {"layer_norm", "rope", "swiglu"},
    "starcoder2": {"layer_norm", "rope", "gelu"},
}
KERNELS = ("rms_norm", "layer_norm", "rope", "swiglu", "gelu", "clipped_swiglu")


@pytest.fixture
def called(compiled, monkeypatch):
    """The names of the kernels that were called."""
    names = set()

    def watched(name, kernel):
        def call(*arguments):
            names.add(name)
            return kernel(*arguments)

        return call

    for name in KERNELS:
        monkeypatch.setattr(native, name, watched(name, getattr(native, name)))
    return names


def logits(model):
    return np.array(model(TOKENS, cache=make_prompt_cache(model)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_model_runs_on_the_kernels_and_another_one_does_not(called, name):
    plain, model = zoo_model(name), zoo_model(name)
    expected = logits(plain)
    leaves.replace(model)
    assert not called
    assert np.abs(logits(model) - expected).max() <= 1e-4 * np.abs(expected).max()
    assert called == FAMILIES[name]
    called.clear()
    assert np.array_equal(logits(plain), expected)
    assert not called


@pytest.mark.parametrize("approx", ["none", "precise", "fast"])
def test_the_module_gelu(called, approx):
    x, block = mx.random.normal((2, 3, 32)), SwitchMLP(32, 64, 4, activation=nn.GELU(approx))
    indices = mx.array([[[0, 1], [2, 3], [3, 1]]] * 2)
    expected = block(x, indices)
    leaves.replace(block)
    assert mx.allclose(block(x, indices), expected, rtol=1e-4, atol=1e-5)
    assert called == {"gelu"}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_other_types_and_shapes_go_on_to_mlx(called, dtype):
    x = mx.random.normal((3, 8)).astype(dtype)
    gate = mx.random.normal((1, 8)).astype(dtype)
    for plain, wrapper in functions._WRAPPERS:
        if plain.__name__ in ("geglu", "swiglu", "swiglu_oai"):
            expected = plain(gate, x)
            before = functions._in_use.set(True)
            assert mx.array_equal(wrapper(gate, x), expected)
            functions._in_use.reset(before)
    assert not called


def test_what_mlx_compiles_for_all_holds_no_kernel(called):
    """Whoever calls it first, the graph that MLX keeps is run by models without kernels too."""
    model = zoo_model("gemma3n")
    leaves.replace(model)
    logits(model)
    called.clear()
    topk = sys.modules["mlx_lm.models.gemma3n"].gelu_topk
    before = functions._in_use.set(True)
    mx.eval(topk(mx.random.normal((1, 2, 3, 24)), mx.array(0.5)))
    functions._in_use.reset(before)
    assert not called
