"""Checkpoints that both sides of a benchmark can load."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.model.load import load


def float32_checkpoint(path: Path, folder: Path) -> Path:
    """The checkpoint with every weight as float32, so that both servers compute the same."""
    loaded = load(path)
    weights = {name: array.astype(mx.float32) for name, array in tree_flatten(loaded.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {k: v for k, v in loaded.config.items() if not k.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))
    _copy_the_rest(path, folder)
    return folder


def shallow_checkpoint(path: Path, folder: Path, num_layers: int) -> Path:
    """The checkpoint of a plain decoder with its first `num_layers` layers alone: a draft model of little wit."""
    weights: dict[str, mx.array] = {}
    for file in path.glob("*.safetensors"):
        weights |= mx.load(str(file))  # type: ignore[arg-type]
    dropped = re.compile(r"\.layers\.(\d+)\.")
    kept = {
        name: array
        for name, array in weights.items()
        if (found := dropped.search(name)) is None or int(found[1]) < num_layers
    }
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    _copy_the_rest(path, folder)
    return folder


def _copy_the_rest(path: Path, folder: Path) -> None:
    """What a checkpoint has beside its weights and its configuration."""
    for file in path.iterdir():
        if file.name.startswith(("tokenizer", "generation_config", "special_tokens", "chat_template")):
            shutil.copy(file, folder / file.name)
