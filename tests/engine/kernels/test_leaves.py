"""A model whose leaves are compiled says what mlx-lm says, and its weights stay as they were loaded."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import leaves, native
from engine.model import placement
from engine.model.inspect import describe
from engine.model.load import load
from tests.tiny import write_checkpoint
from tests.zoo import write_zoo

TOKENS = mx.array([[5, 9, 200, 9, 77]])
BITS = (2, 3, 4, 5, 6, 8)


def packed_checkpoint(folder, bits, dtype=mx.bfloat16, family="llama", mode="affine"):
    """A tiny checkpoint whose leaves are packed, and mlx-lm's own logits for it in float32."""
    write_zoo(folder, family)
    model, config = load_model(folder)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=bits, mode=mode, class_predicate=_rows_of_whole_groups)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    config["quantization"] = {"group_size": 32, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _rows_of_whole_groups(_, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def logits(model):
    return np.array(model(TOKENS).astype(mx.float32))


def assert_close(ours, theirs, tolerance):
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("bits", BITS)
def test_packed_leaves_stay_packed(compiled, tmp_path, bits):
    folder = packed_checkpoint(tmp_path / "model", bits)
    loaded = load(folder, compiled=True)
    assert_close(logits(loaded.model), logits(load(folder).model), 1e-4)
    projection = loaded.model.model.layers[0].self_attn.q_proj
    assert leaves.is_compiled(projection)
    assert isinstance(projection, nn.QuantizedLinear)
    assert projection.weight.dtype == mx.uint32
    assert loaded.notes[0].startswith(f"weights: {bits}-bit (")
    assert loaded.notes[0].endswith("), activations float32")
    assert loaded.model(TOKENS).dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_plain_leaves_keep_their_type(compiled, tmp_path, dtype):
    folder = write_checkpoint(tmp_path / "model")
    file = str(folder / "model.safetensors")
    mx.save_safetensors(
        file, {name: array.astype(dtype) for name, array in mx.load(file).items()}, metadata={"format": "mlx"}
    )
    plain, _ = load_model(folder)
    plain.set_dtype(mx.float32)
    loaded = load(folder, compiled=True)
    assert_close(logits(loaded.model), logits(plain), 1e-5)
    assert loaded.model.model.embed_tokens.weight.dtype == dtype
    assert loaded.model.model.norm.weight.dtype == mx.float32


@pytest.mark.parametrize("bits", BITS)
def test_packed_experts_stay_packed(compiled, tmp_path, bits):
    folder = packed_checkpoint(tmp_path / "model", bits, family="mixtral")
    loaded = load(folder, compiled=True)
    assert_close(logits(loaded.model), logits(load(folder).model), 1e-4)
    experts = loaded.model.model.layers[0].block_sparse_moe.switch_mlp.up_proj
    assert leaves.is_compiled(experts)
    assert experts.weight.dtype == mx.uint32
    assert loaded.weight_bytes == describe(folder, kernels=native.start()).weight_bytes
    assert loaded.notes[0].endswith("), activations float32")


@pytest.mark.parametrize("fits", [True, False])
def test_packed_layers_that_no_kernel_knows_are_expanded_where_they_fit(compiled, tmp_path, monkeypatch, fits):
    folder = packed_checkpoint(tmp_path / "model", 4, family="mixtral", mode="mxfp4")
    expected = logits(load(folder).model)
    if not fits:
        monkeypatch.setattr(placement, "EXPANDED_SHARE", 0.0)
    said = describe(folder, kernels=native.start())
    loaded = load(folder, compiled=True)
    assert_close(logits(loaded.model), expected, 1e-4 if fits else 0.05)
    experts = loaded.model.model.layers[0].block_sparse_moe.switch_mlp.up_proj
    assert leaves.is_compiled(experts) == fits
    assert experts.weight.dtype == (mx.float32 if fits else mx.uint32)
    assert said.weight_bytes == loaded.weight_bytes
    how = "expanded to float32" if fits else "packed, slow: they do not fit expanded"
    assert loaded.notes[0].endswith(f"), activations float32, mxfp4 layers {how}")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_experts_keep_their_type(compiled, tmp_path, dtype):
    folder = write_zoo(tmp_path / "mixtral", "mixtral")
    file = str(folder / "model.safetensors")
    halves = {name: array.astype(dtype) for name, array in mx.load(file).items()}
    mx.save_safetensors(file, halves, metadata={"format": "mlx"})
    said, loaded = describe(folder, kernels=native.start()), load(folder, compiled=True)
    assert_close(logits(loaded.model), logits(load(folder).model), 1e-4)
    assert loaded.model.model.layers[0].block_sparse_moe.switch_mlp.up_proj.weight.dtype == dtype
    assert said.weight_bytes == loaded.weight_bytes


def test_an_engine_answers_the_same_with_and_without(compiled, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    engines = [
        Engine.open(EngineConfig(model=folder, portable=portable, cache_dtype="float32"))
        for portable in (True, False)
    ]
    assert engines[0].mode == engines[1].mode == "spans"
    assert "exactly" in engines[1].verdict.reason
    assert "exactly" in engines[0].verdict.reason


def test_weights_that_are_laid_together_are_what_they_were(compiled):
    arrays = [mx.arange(7), mx.ones((3, 5), mx.bfloat16), mx.zeros((0, 4)), mx.array([[1.5]]), mx.arange(999.0)]
    mx.eval(arrays)
    copies = native.lay_together(arrays)
    assert all(mx.array_equal(copy, array) for copy, array in zip(copies, arrays, strict=True))
    assert [copy.dtype for copy in copies] == [array.dtype for array in arrays]
    del arrays
    assert mx.array_equal(copies[-1] + copies[0][1], mx.arange(1.0, 1000.0))
    assert native.lay_together([]) == []
