"""Adapters for tests: noise beside the linear layers of a model, in the files that mlx-lm and PEFT write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.adapters.files import shape_of


def linear_layers(model: Any) -> list[str]:
    """The names of the linear layers in the blocks of `model`."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.QuantizedLinear)) and any(map(str.isdigit, name.split(".")))
    ]


def write_adapter(
    folder: Path,
    model: Any,
    layers: Sequence[str] | None = None,
    *,
    rank: int = 4,
    scale: float = 2.0,
    dora: bool = False,
    peft: bool = False,
    seed: int = 1,
    dtype: mx.Dtype = mx.float32,
    size: float = 0.1,
) -> Path:
    """A folder with noise for `layers`, or for all linear ones, which is not small."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = dict(model.named_modules())
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))
    weights: dict[str, mx.array] = {}
    for name in linear_layers(model) if layers is None else layers:
        outputs, inputs = shape_of(modules[name])
        down = mx.random.normal((inputs, rank), key=next(keys)) * inputs**-0.5
        up = size * mx.random.normal((rank, outputs), key=next(keys))
        magnitude = 1 + mx.abs(mx.random.normal((outputs,), key=next(keys)))
        if peft:
            weights[f"base_model.model.{name}.lora_A.weight"] = down.T
            weights[f"base_model.model.{name}.lora_B.weight"] = up.T
        else:
            weights[f"{name}.lora_a"], weights[f"{name}.lora_b"] = down, up
        if dora:
            weights[f"base_model.model.{name}.lora_magnitude_vector" if peft else f"{name}.m"] = magnitude
    file = folder / ("adapter_model.safetensors" if peft else "adapters.safetensors")
    mx.save_safetensors(str(file), {name: mx.contiguous(array.astype(dtype)) for name, array in weights.items()})
    said: dict[str, Any]
    if peft:
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none", "use_dora": dora}
    else:
        parameters = {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": sorted({_key(name) for name in weights}),
        }
        said = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 99, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def _key(name: str) -> str:
    """A layer's name within its block, as mlx-lm's configuration has it."""
    parts = name.split(".")[:-1]
    block = next(at for at, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[block + 1 :])
