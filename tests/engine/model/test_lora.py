"""Adapters: what the engine computes with one is what mlx-lm computes with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load as mlx_lm_load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from engine.cache.adapter import select_before_head
from engine.config import GREEDY, EngineConfig
from engine.direct import DirectEngine
from engine.engine import Engine
from engine.errors import ModelError, ModelIncomplete
from engine.kernels import leaves, native
from engine.model import placement as placing
from engine.model.load import load
from engine.request import Request
from tests.tiny import VOCAB_SIZE, write_checkpoint

TOKENS = [5, 9, 200, 9, 77]
UNTIED = {"tie_word_embeddings": False}
BLOCK_KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., Path]:
    """Makes a tiny llama, its weights packed where `bits` is given or in another type where `dtype` is."""

    def make(*, bits: int = 0, dtype: mx.Dtype = mx.float32, **overrides: Any) -> Path:
        folder = write_checkpoint(tmp_path / "base", "llama", **overrides)
        model, config = load_model(folder)
        model.set_dtype(dtype)
        if bits:
            nn.quantize(model, group_size=32, bits=bits)
            config["quantization"] = {"group_size": 32, "bits": bits}
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def write_adapter(base: Path, keys: list[str], *, kind: str = "lora", num_layers: int = 2) -> Path:
    """An adapter of `base` as mlx-lm's training writes it, its low-rank weights random and not small."""
    folder = base.parent / "adapter"
    folder.mkdir()
    said = {"rank": 4, "scale": 2.0, "dropout": 0.1, "keys": keys}
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": said}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load_model(base)
    model.freeze()
    linear_to_lora_layers(model, num_layers, said, use_dora=kind == "dora")
    mx.random.seed(1)
    weights = {
        name: array + 0.2 * mx.random.normal(array.shape)
        for name, array in tree_flatten(model.trainable_parameters())
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


BASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, untied": UNTIED,
    "4 bits": {"bits": 4},
    "8 bits, untied": {"bits": 8, **UNTIED},
}
KEYS = {
    "blocks": BLOCK_KEYS,
    "blocks and the embedding": [*BLOCK_KEYS, "model.embed_tokens"],
    "the head": ["lm_head"],
}


# A tied head is the embedding: only an untied one can have an adapter of its own.
CASES = {
    f"{how} with {where}": (BASES[how], KEYS[where])
    for how in BASES
    for where in KEYS
    if where != "the head" or "untied" in how
}


@pytest.mark.parametrize(("how", "keys"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("expanded", [True, False])
def test_logits_are_those_of_mlx_lm(
    base: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    keys: list[str],
    expanded: bool,
) -> None:
    folder = base(**how)
    adapter = write_adapter(folder, keys)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    expected, _ = mlx_lm_load(str(folder), adapter_path=str(adapter))
    if not expanded:
        monkeypatch.setattr(placing, "EXPANDED_SHARE", 0.0)
    loaded = load(folder, adapter=adapter)
    np.testing.assert_allclose(logits(loaded.model), logits(expected), atol=2e-4)
    assert np.abs(logits(loaded.model) - logits(load_model(folder)[0])).max() > 0.1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    kept = "bits" in how and not expanded
    assert any("lora_a" in module for module in loaded.model.modules()) == kept
    assert loaded.notes[1].endswith("beside the weights" if kept else "added into the weights")


@pytest.mark.parametrize("how", [{}, {"bits": 4}])
@pytest.mark.parametrize("expanded", [True, False])
def test_dora_is_that_of_mlx_lm(
    base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], expanded: bool
) -> None:
    folder = base(**how)
    adapter = write_adapter(folder, BLOCK_KEYS, kind="dora")
    expected, _ = mlx_lm_load(str(folder), adapter_path=str(adapter))
    if not expanded:
        monkeypatch.setattr(placing, "EXPANDED_SHARE", 0.0)
    np.testing.assert_allclose(logits(load(folder, adapter=adapter).model), logits(expected), atol=2e-4)


def test_half_precision_weights_keep_their_adapter_beside_them(base: Callable[..., Path]) -> None:
    folder = base(dtype=mx.bfloat16)
    adapter = write_adapter(folder, BLOCK_KEYS)
    expected, _ = mlx_lm_load(str(folder), adapter_path=str(adapter))
    loaded = load(folder, adapter=adapter)
    np.testing.assert_array_equal(logits(loaded.model), logits(expected))
    assert "6 layers beside the weights" in loaded.notes[1]


def test_whole_weights_replace_the_checkpoints(base: Callable[..., Path]) -> None:
    folder = base()
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full", "num_layers": 2}))
    name = "model.layers.1.mlp.down_proj.weight"
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: mx.zeros((32, 64))})
    loaded = load(folder, adapter=adapter)
    assert not loaded.model.model.layers[1].mlp.down_proj.weight.any()
    assert loaded.notes[1].endswith("whole weights")


@pytest.mark.parametrize(
    ("how", "keys"), [(UNTIED, ["lm_head"]), ({}, ["model.embed_tokens"])], ids=["head", "tied embedding"]
)
def test_a_head_with_an_adapter_around_it_runs_on_the_selected_tokens_only(
    base: Callable[..., Path], how: dict[str, Any], keys: list[str]
) -> None:
    folder = base(bits=4, **how)
    model, _ = mlx_lm_load(str(folder), adapter_path=str(write_adapter(folder, keys)))
    whole = logits(model)
    selection = select_before_head(model, VOCAB_SIZE)
    with selection.of([1, 4], axis=1):
        selected = logits(model)
    assert selected.shape == (1, 2, VOCAB_SIZE)
    np.testing.assert_allclose(selected, whole[:, [1, 4]], atol=1e-4)


def test_the_engine_runs_with_an_adapter(base: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base(bits=4, **UNTIED)
    adapter = write_adapter(folder, [*BLOCK_KEYS, "lm_head"])
    expected, _ = mlx_lm_load(str(folder), adapter_path=str(adapter))
    first = int(logits(expected)[0, -1].argmax())
    assert first != int(logits(load_model(folder)[0])[0, -1].argmax())
    for share in (1.0, 0.0):
        monkeypatch.setattr(placing, "EXPANDED_SHARE", share)
        engine = DirectEngine(Engine.open(EngineConfig(model=folder, adapter=adapter)))
        [output] = engine.complete(Request("r", tuple(TOKENS), GREEDY, 1, ignore_eos=True))
        assert output.token == first


def test_what_is_no_adapter_of_this_model_is_one_line(base: Callable[..., Path]) -> None:
    folder = base()

    def refused(kind: type[ModelError], adapter: Path) -> str:
        with pytest.raises(kind) as caught:
            load(folder, adapter=adapter)
        assert "\n" not in str(caught.value)
        assert "mlx_lm.lora" in caught.value.hint
        return str(caught.value)

    assert "adapter_config.json is missing" in refused(ModelIncomplete, folder.parent / "nowhere")
    adapter = write_adapter(folder, BLOCK_KEYS)
    config, weights = adapter / "adapter_config.json", adapter / "adapters.safetensors"
    said, whole = json.loads(config.read_text()), weights.read_bytes()

    weights.unlink()
    assert "adapters.safetensors is missing" in refused(ModelIncomplete, adapter)
    weights.write_bytes(whole[: len(whole) // 2])
    assert "does not fit" in refused(ModelError, adapter)
    arrays = {name: mx.array(array) for name, array in mx.load(str(write_back(weights, whole))).items()}
    name = "model.layers.0.self_attn.q_proj.lora_b"
    mx.save_safetensors(str(weights), {key: array for key, array in arrays.items() if key != name})
    assert f"has no {name}" in refused(ModelIncomplete, adapter)
    mx.save_safetensors(str(weights), arrays | {name: mx.zeros((4, 8))})
    assert f"{name}: adapter shape (4, 8)" in refused(ModelError, adapter)
    mx.save_safetensors(str(weights), arrays | {"model.layers.7.self_attn.q_proj.lora_b": mx.zeros((4, 8))})
    assert "model.layers.7" in refused(ModelError, adapter)
    write_back(weights, whole)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    assert "no adapter of mlx-lm" in refused(ModelError, adapter)
    config.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load(folder, adapter=adapter)
    config.write_text(json.dumps(said | {"lora_parameters": {"rank": 4}}))
    assert "scale" in refused(ModelError, adapter)


def write_back(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("how", "keys"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_compiled_kernels_compute_the_same(
    base: Callable[..., Path], how: dict[str, Any], keys: list[str], kind: str
) -> None:
    """The adapter is put in before the leaves are handed over, and those inside its layers are among them."""
    if isinstance(started := native.start(), str):
        pytest.skip(f"kernels: portable ({started})")
    folder = base(**how)
    adapter = write_adapter(folder, keys if kind == "lora" else BLOCK_KEYS, kind=kind)
    portable = logits(load(folder, adapter=adapter).model)
    compiled = load(folder, adapter=adapter, compiled=True)
    assert any(leaves.is_compiled(module) for module in compiled.model.modules())
    assert np.abs(logits(compiled.model) - portable).max() <= 1e-4 * np.abs(portable).max()
