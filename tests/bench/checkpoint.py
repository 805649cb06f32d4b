"""Checkpoints that both sides of a benchmark can load."""

import json
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
    for file in path.iterdir():
        if file.name.startswith(("tokenizer", "generation_config", "special_tokens", "chat_template")):
            shutil.copy(file, folder / file.name)
    return folder
