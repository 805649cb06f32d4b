import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, RopeScalingType, quants
from mlx_lm.utils import load_model

from engine.errors import ModelError, ModelIncomplete, UnsupportedModel
from engine.model.gguf import GGUFFile, _llama3_divisors, import_gguf
from engine.model.store import check_complete
from tests.engine.model.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TOKENS, weights, write_gguf


def imported(tmp_path: Path, tensors: dict[str, np.ndarray] | None = None, **how: Any) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    import_gguf(write_gguf(tmp_path / "m.gguf", tensors, **how), folder)
    check_complete(folder)
    return folder


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(folder: Path, tokens: list[int]) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def test_a_mixed_file_keeps_the_width_of_each_layer(tmp_path: Path) -> None:
    kinds = {"token_embd.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q8_0, "blk.0.attn_v.weight": Kind.F16}
    tensors = weights()
    folder = imported(tmp_path, tensors, kind=lambda name: kinds.get(name, Kind.Q4_1))
    said = config(folder)["quantization"]
    wide = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert said == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": wide,
        "model.layers.1.mlp.down_proj": wide,
    }
    model, _ = load_model(folder)
    assert (model.model.embed_tokens.bits, model.model.layers[1].mlp.down_proj.bits) == (8, 8)
    gate = model.model.layers[0].mlp.gate_proj
    assert gate.bits == 4
    expected = quants.dequantize(quants.quantize(tensors["blk.0.ffn_gate.weight"], Kind.Q4_1), Kind.Q4_1)
    unpacked = mx.dequantize(gate.weight, gate.scales, gate.biases, group_size=32, bits=4)
    np.testing.assert_array_equal(np.array(unpacked), expected)
    value = model.model.layers[0].self_attn.v_proj.weight
    np.testing.assert_array_equal(np.array(value), tensors["blk.0.attn_v.weight"].astype(np.float16))


def test_bfloat16_is_copied_bit_for_bit(tmp_path: Path) -> None:
    tensors = weights()
    folder = imported(tmp_path, tensors, kind=lambda _: Kind.BF16)
    stored = mx.load(str(folder / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    assert stored.dtype == mx.bfloat16
    bits = np.array(stored.view(mx.uint16))
    expected = quants.quantize(tensors["blk.0.ffn_up.weight"], Kind.BF16).view(np.uint16)
    np.testing.assert_array_equal(bits, expected)
    assert config(folder)["torch_dtype"] == "bfloat16"


def reference(tensors: dict[str, np.ndarray], tokens: list[int], theta: float = 10000.0) -> np.ndarray:
    """A llama by GGUF's own rules: rotary pairs lie side by side. Logits `[tokens, vocabulary]`, in float64."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = w["token_embd.weight"][tokens]
    causal = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(LAYERS):
        h = norm(x, f"blk.{i}.attn_norm.weight")
        query = rotate((h @ w[f"blk.{i}.attn_q.weight"].T).reshape(len(tokens), HEADS, HEAD_DIM))
        key = rotate((h @ w[f"blk.{i}.attn_k.weight"].T).reshape(len(tokens), KV_HEADS, HEAD_DIM))
        value = (h @ w[f"blk.{i}.attn_v.weight"].T).reshape(len(tokens), KV_HEADS, HEAD_DIM)
        key, value = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(HEAD_DIM) + causal
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = (
            x
            + np.einsum("hqk,khd->qhd", shares, value).reshape(len(tokens), -1)
            @ w[f"blk.{i}.attn_output.weight"].T
        )
        h = norm(x, f"blk.{i}.ffn_norm.weight")
        gate = h @ w[f"blk.{i}.ffn_gate.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ w[f"blk.{i}.ffn_up.weight"].T)) @ w[f"blk.{i}.ffn_down.weight"].T
        )
    return norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_an_imported_llama_computes_what_the_gguf_means(tmp_path: Path, tied: bool) -> None:
    tensors, tokens = weights(tied=tied), [5, 9, 200, 9, 77, 130]
    folder = imported(tmp_path, tensors)
    assert config(folder)["tie_word_embeddings"] is tied
    np.testing.assert_allclose(logits(folder, tokens), reference(tensors, tokens), atol=2e-5)


def test_the_configuration_is_whole(tmp_path: Path) -> None:
    said = config(imported(tmp_path))
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "rope_theta": 10000.0, "max_position_embeddings": 128, "vocab_size": len(TOKENS),
        "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "float32", "eos_token_id": 2,
    }  # fmt: skip
    assert said | expected == said
    assert said["rms_norm_eps"] == pytest.approx(1e-5)
    assert "quantization" not in said


def test_every_end_of_sequence_id_is_kept(tmp_path: Path) -> None:
    folder = imported(tmp_path, more=lambda writer: writer.add_eot_token_id(0))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def with_factors(factors: np.ndarray) -> dict[str, np.ndarray]:
    return {"rope_freqs.weight": factors.astype(np.float32), **weights()}


def test_llama3_rope_factors_become_its_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = _llama3_divisors(scaling, HEAD_DIM, 500000.0)
    folder = imported(tmp_path, with_factors(divisors), theta=500000.0)
    assert config(folder)["rope_scaling"] == scaling
    model, _ = load_model(folder)
    plain = 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(np.array(model.model.layers[0].self_attn.rope._freqs), plain * divisors, rtol=1e-5)


def test_linear_rope_scaling_is_taken_over(tmp_path: Path) -> None:
    def scaled(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert config(imported(tmp_path, more=scaled))["rope_scaling"]["factor"] == 4.0


def test_qwen2_keeps_row_order_and_biases(tmp_path: Path) -> None:
    tensors = weights()
    for i in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"blk.{i}.attn_{part}.bias"] = np.arange(heads * HEAD_DIM, dtype=np.float32)
    model, said = load_model(imported(tmp_path, tensors, architecture="qwen2"))
    assert said["model_type"] == "qwen2"
    attention = model.model.layers[1].self_attn
    np.testing.assert_array_equal(np.array(attention.q_proj.weight), tensors["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(np.array(attention.k_proj.bias), tensors["blk.1.attn_k.bias"])


def test_qwen3_keeps_its_query_and_key_norms(tmp_path: Path) -> None:
    tensors = weights()
    for i in range(LAYERS):
        tensors[f"blk.{i}.attn_q_norm.weight"] = np.linspace(1, 2, HEAD_DIM, dtype=np.float32)
        tensors[f"blk.{i}.attn_k_norm.weight"] = np.linspace(2, 3, HEAD_DIM, dtype=np.float32)
    model, said = load_model(imported(tmp_path, tensors, architecture="qwen3"))
    assert (said["model_type"], said["head_dim"]) == ("qwen3", HEAD_DIM)
    np.testing.assert_array_equal(
        np.array(model.model.layers[0].self_attn.k_norm.weight), tensors["blk.0.attn_k_norm.weight"]
    )


def test_gemma3_norms_lose_the_one_that_gguf_adds(tmp_path: Path) -> None:
    tensors = weights()
    for i in range(LAYERS):
        for part in ("attn_q_norm", "attn_k_norm"):
            tensors[f"blk.{i}.{part}.weight"] = np.full(HEAD_DIM, 1.5, np.float32)
        for part in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{i}.{part}.weight"] = np.full(HIDDEN, 1.25, np.float32)
    folder = imported(tmp_path, tensors, architecture="gemma3", more=lambda writer: writer.add_sliding_window(32))
    model, said = load_model(folder)
    assert (said["model_type"], said["sliding_window"], said["query_pre_attn_scalar"]) == (
        "gemma3_text",
        32,
        HEAD_DIM,
    )
    layer = model.model.layers[0]
    assert layer.self_attn.q_norm.weight.tolist() == [0.5] * HEAD_DIM
    assert layer.post_feedforward_layernorm.weight.tolist() == [0.25] * HIDDEN
    expected = tensors["blk.0.ffn_norm.weight"] - 1
    np.testing.assert_array_equal(np.array(layer.pre_feedforward_layernorm.weight), expected)
    np.testing.assert_array_equal(np.array(layer.self_attn.q_proj.weight), tensors["blk.0.attn_q.weight"])


def refused(tmp_path: Path, **how: Any) -> str:
    source = write_gguf(tmp_path / "m.gguf", **how)
    with pytest.raises(UnsupportedModel) as caught:
        import_gguf(source, tmp_path)
    return str(caught.value)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    said = refused(tmp_path, architecture="mamba")
    assert "mamba" in said
    assert "gemma3, llama, qwen2, qwen3" in said
    assert "attn_q.weight is MXFP4" in refused(
        tmp_path, kind=lambda name: Kind.MXFP4 if name == "blk.0.attn_q.weight" else Kind.F32
    )
    assert "blk.0.odd.weight" in refused(
        tmp_path, tensors={**weights(), "blk.0.odd.weight": np.ones(4, np.float32)}
    )
    assert "yarn" in refused(tmp_path, more=lambda writer: writer.add_rope_scaling_type(RopeScalingType.YARN))
    assert "experts" in refused(tmp_path, more=lambda writer: writer.add_expert_count(8))
    assert "one of 3 parts" in refused(tmp_path, more=lambda writer: writer.add_uint16("split.count", 3))
    assert "rope_freqs" in refused(tmp_path, tensors=with_factors(np.linspace(1, 3, HEAD_DIM // 2)))
    assert "vocabulary" in refused(tmp_path, tensors=weights(vocab=len(TOKENS) + 1))
    assert "head" in refused(tmp_path, more=lambda writer: writer.add_rope_dimension_count(HEAD_DIM // 2))


def test_a_file_cut_anywhere_is_refused_and_never_a_traceback(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 12, 23, 24, 25, *range(30, len(whole), len(whole) // 150), len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelIncomplete, match="cut short"):
            GGUFFile(cut)


def test_a_file_of_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    odd = tmp_path / "odd.gguf"
    for head, said in ((b"GGML", "not a GGUF"), (b"GGUF" + struct.pack("<I", 9), "version 9")):
        odd.write_bytes(head + whole[len(head) :])
        with pytest.raises(UnsupportedModel, match=said):
            GGUFFile(odd)


def test_damaged_headers_end_in_a_model_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    random = np.random.default_rng(0)
    odd = tmp_path / "odd.gguf"
    (tmp_path / "out").mkdir()
    for _ in range(300):
        damaged = bytearray(whole)
        for at in random.integers(0, 7000, 3):
            damaged[at] = random.integers(0, 256)
        odd.write_bytes(damaged)
        try:
            import_gguf(odd, tmp_path / "out")
        except ModelError:
            continue


def test_importing_loads_no_mlx() -> None:
    script = (
        "import sys, engine.model.gguf; print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
