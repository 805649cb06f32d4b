"""Tiny checkpoints of encoders, with weights by the names that transformers gives them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny import VOCAB_SIZE, write_tokenizer

SIZE, INNER, LAYERS, HEADS = 32, 48, 3, 4
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _COMMON
    | {"model_type": "bert", "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12},
    "xlm-roberta": _COMMON
    | {
        "model_type": "xlm-roberta",
        "max_position_embeddings": 66,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    },
    "modernbert": _COMMON
    | {"model_type": "modernbert", "max_position_embeddings": 64, "local_attention": 8, "norm_eps": 1e-5},
}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (SIZE,), f"{name}.bias": (SIZE,)}


def _bert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, SIZE),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], SIZE),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], SIZE),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", SIZE, SIZE),
    }
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{layer}.attention.{name}", SIZE, SIZE)
        shapes |= _norm(f"{layer}.attention.output.LayerNorm") | _norm(f"{layer}.output.LayerNorm")
        shapes |= _linear(f"{layer}.intermediate.dense", SIZE, INNER)
        shapes |= _linear(f"{layer}.output.dense", INNER, SIZE)
    return shapes


def _modernbert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.tok_embeddings.weight": (VOCAB_SIZE, SIZE),
        "model.embeddings.norm.weight": (SIZE,),
        "model.final_norm.weight": (SIZE,),
        "head.dense.weight": (SIZE, SIZE),
        "decoder.bias": (VOCAB_SIZE,),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.attn_norm.weight": (SIZE,)} if number else {}
        shapes |= {
            f"{layer}.attn.Wqkv.weight": (3 * SIZE, SIZE),
            f"{layer}.attn.Wo.weight": (SIZE, SIZE),
            f"{layer}.mlp_norm.weight": (SIZE,),
            f"{layer}.mlp.Wi.weight": (2 * INNER, SIZE),
            f"{layer}.mlp.Wo.weight": (SIZE, INNER),
        }
    return shapes


def encoder_weights(family: str, prefix: str = "") -> dict[str, mx.array]:
    """Random ones, norms around one, by their names in a checkpoint."""
    shapes = (_modernbert if family == "modernbert" else _bert)(CONFIGS[family])
    keys = mx.random.split(mx.random.key(7), len(shapes))
    return {
        prefix + name: 0.2 * mx.random.normal(shape, key=key) + ("orm.weight" in name)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def write_encoder(folder: Path, family: str = "bert", *, prefix: str = "", **overrides: Any) -> Path:
    """A complete checkpoint folder of `family`, with a tokenizer of bytes and no chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = encoder_weights(family, prefix)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | overrides))
    write_tokenizer(folder, template=None)
    return folder
