"""Tiny real checkpoints: mlx-lm's own classes, random float32 weights with noise, a byte-level tokenizer.

Noise matters: freshly initialized norms and biases are ones and zeros and hide mistakes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
END_OF_TURN = VOCAB_SIZE - 1

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON = {"vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5, "eos_token_id": END_OF_TURN}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "gemma3_text": _COMMON
    | {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 4096,
    },
    "mamba2": _COMMON
    | {
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "max_position_embeddings": 4096,
    },
}


def write_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """A complete checkpoint folder of `family` with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family] | overrides
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    weights = {
        name: array + 0.1 * mx.random.normal(array.shape, key=next(keys))
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def byte_tokenizer(more: Sequence[str] = ()) -> Tokenizer:
    """One id for each byte, so that any text has tokens and any character can be cut; special ones, and `more`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, *more)])
    return tokenizer


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, more: Sequence[str] = ()) -> None:
    byte_tokenizer(more).save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        said["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
