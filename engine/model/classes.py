"""Which classes a checkpoint is loaded into: mlx-lm's, mlx-lm's with names put right, or an encoder of ours.

Checkpoints made for embeddings are often saved from the middle of a model: the blocks, and no output head around
them. Their weights lack the name of the part that they are, which mlx-lm looks for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

from engine.encoder import bert, modernbert
from engine.encoder.bothways import ALIASES

PART = "model"
HEADLESS = {"tie_word_embeddings": True}  # so that no weights of a head are missed
ENCODERS: Mapping[str, tuple[type, type]] = {
    **dict.fromkeys(bert.FAMILIES, (bert.Bert, bert.Arguments)),
    **dict.fromkeys(modernbert.FAMILIES, (modernbert.ModernBert, modernbert.Arguments)),
}


@dataclass(frozen=True, slots=True)
class Classes:
    """`of` gives model and arguments classes for a configuration, `configured` is what that is to say beside what
    it says. `only` is why the model gives embeddings alone, if it does.
    """

    of: Callable[[dict[str, Any]], tuple[type, type]] = _get_classes
    configured: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""


def is_headless(path: Path) -> bool:
    """Whether the checkpoint folder `path` has blocks that are part of nothing."""
    names = [str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file))]
    return any(name.startswith("layers.") for name in names) and not any(
        name.startswith((f"{PART}.", "lm_head.")) for name in names
    )


def classes_for(path: Path, said: Mapping[str, Any]) -> Classes:
    """Those of the checkpoint folder `path`, whose configuration is `said`."""
    name = str(said.get("model_type"))
    if name in ENCODERS:
        return Classes(lambda config: ENCODERS[name])
    configured = {"model_type": ALIASES.get(name, name)}
    if is_headless(path):
        return Classes(_headless, configured | HEADLESS, "the checkpoint has no output head")
    return Classes(configured=configured if name in ALIASES else {})


def _headless(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes, the model's taking names as they are in checkpoints without a head."""
    model_class, arguments_class = _get_classes(config)

    class Headless(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if PART in self:
                weights = {f"{PART}.{name}": array for name, array in weights.items()}
            sanitize = getattr(super(), "sanitize", None)
            self.__class__ = model_class
            return weights if sanitize is None else sanitize(weights)

    return Headless, arguments_class
