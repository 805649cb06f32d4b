"""The zoo: one tiny model of each family, of mlx-lm's own classes, built in memory with noise for weights.

A family's entry says what its configuration has beyond `COMMON`, with every kind of layer it knows and windows
short enough to be left, and what the probe is expected to say of it.
"""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.kernels import portable
from engine.model.load import LoadedModel
from engine.model.store import default_home
from tests.engines import Watched
from tests.tiny import END_OF_TURN, VOCAB_SIZE, write_tokenizer
from tests.zoo.family import WINDOW, Family
from tests.zoo.named import NAMED
from tests.zoo.others import OTHERS

ZOO: dict[str, Family] = NAMED | OTHERS

# Names that many configurations share; each takes the ones it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "sliding_window": WINDOW,
    # experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    # latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # linear attention
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@functools.cache
def zoo_engine(name: str, mode: str | None = None, cache_dtype: str = "auto") -> Watched:
    """An engine over the family's model, made once. It runs in `mode`, or in the one that the probe finds.

    As a rule keys and values are stored as mlx-lm stores them, whose logits are what they are compared with.
    """
    portable.prepare(default_home() / "kernels")
    return Watched(zoo_loaded(zoo_model(name)), mode=mode, cache_dtype=cache_dtype)


def zoo_loaded(model: Any) -> LoadedModel:
    """A model of the zoo as if it had been loaded: bytes for tokens, no end of sequence, no chat template."""
    return LoadedModel(
        model=model,
        tokenizer=_Bytes(),
        config={},
        context_length=4096,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
        sampling=None,
        weight_bytes=0,
        notes=(),
    )


class _Bytes:
    """As much of a tokenizer as the engine asks for."""

    has_chat_template = has_thinking = False
    tool_parser, structural_markers = None, ()
    bos_token = eos_token = None

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        return list(text.encode())

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return chr(token) if token < 128 else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token % 256 for token in ids).decode(errors="replace")


def zoo_config(name: str) -> dict[str, Any]:
    """The family's whole configuration; what follows a comma in its name says which variant."""
    said = ZOO[name].config
    common = COMMON | {"model_type": name.partition(",")[0]}
    if "text_config" in said:
        said = said | {"text_config": common | said["text_config"]}
    return common | said


def write_zoo(folder: Path, name: str, **overrides: Any) -> Path:
    """A complete checkpoint folder of the family, with the tokenizer and the template of `tests.tiny`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(zoo_model(name, **overrides).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    said = {key: value for key, value in (zoo_config(name) | overrides).items() if value is not None}
    if bits := ZOO[name].bits:
        said |= {"quantization": {"group_size": 32, "bits": bits}}
    (folder / "config.json").write_text(json.dumps(said | {"eos_token_id": END_OF_TURN}))
    write_tokenizer(folder)
    return folder


def zoo_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A model of the family, evaluated. The same seed gives the same weights."""
    config = zoo_config(name) | overrides
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = mx.random.split(mx.random.key(seed), 2000)
    noisy = [
        (path, _with_noise(array, keys[number]))
        for number, (path, array) in enumerate(tree_flatten(model.parameters()))
    ]
    model.update(tree_unflatten(noisy))
    if bits := ZOO[name].bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=_has_rows_of_whole_groups)
    model.eval()
    mx.eval(model.parameters())
    return model


def _has_rows_of_whole_groups(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def _with_noise(array: mx.array, key: mx.array) -> mx.array:
    """Fresh norms, gates and biases are ones and zeros and hide mistakes."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(mx.float32) + 0.1 * mx.random.normal(array.shape, key=key)
