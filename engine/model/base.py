"""Checkpoints that were saved from the middle of a model: the blocks, and no output head around them.

Encoders made from decoders come like that. Their weights lack the name of the part that they are, which mlx-lm
looks for; its model classes are used as they are, with the names put right on the way.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

PART = "model"
HEADLESS = {"tie_word_embeddings": True}  # so that no weights of a head are missed


def is_base(path: Path) -> bool:
    """Whether the checkpoint folder `path` has blocks that are part of nothing."""
    names = [str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file))]
    return any(name.startswith("layers.") for name in names) and not any(
        name.startswith((f"{PART}.", "lm_head.")) for name in names
    )


def classes_of_base(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes for `config`, the model's taking names as such checkpoints have them."""
    model_class, arguments_class = _get_classes(config)

    class Base(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if PART in self:
                weights = {f"{PART}.{name}": array for name, array in weights.items()}
            sanitize = getattr(super(), "sanitize", None)
            self.__class__ = model_class
            return weights if sanitize is None else sanitize(weights)

    return Base, arguments_class
