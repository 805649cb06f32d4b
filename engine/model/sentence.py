"""What a checkpoint of sentence-transformers says of its vectors: how tokens are pooled, and what comes behind.

Its `modules.json` lists a transformer, a pooling, and perhaps dense layers and a normalization, each with a folder
of its own. A checkpoint without that file says nothing. What is not known here is refused, not left out.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.errors import ModelError
from engine.model.store import read_json
from engine.request import Embedding, Pooling

MODULES = "modules.json"
# The names of poolings: as one word, and as fields of which one is true.
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FIELDS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {"Identity": lambda vector: vector, "Tanh": mx.tanh}


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer behind the pooling: `weight` `[out, in]` and `bias` `[out]`, then an activation."""

    weight: mx.array
    bias: mx.array | None
    activation: Callable[[mx.array], mx.array]

    def __call__(self, vector: mx.array) -> mx.array:
        mapped = self.weight @ vector
        return self.activation(mapped if self.bias is None else mapped + self.bias)


@dataclass(frozen=True, slots=True)
class Sentence:
    """`layers` come between pooling and vector. `refused` is why it gives no vectors here, if it gives none."""

    pooling: Pooling = "last"
    layers: tuple[Dense, ...] = ()
    refused: str = ""

    def embedding(self, hidden_size: int) -> Embedding | None:
        """The whole vector where hidden states have `hidden_size` numbers, None where there are none."""
        if not hidden_size or self.refused:
            return None
        size = int(self.layers[-1].weight.shape[0]) if self.layers else hidden_size
        return Embedding(size, self.pooling)


def sentence_of(path: Path, default: Pooling = "last") -> Sentence:
    """What the checkpoint folder `path` says; `default` is how it pools where it does not say.

    Raises ModelError for files that cannot be read.
    """
    file = path / MODULES
    if not file.is_file():
        return Sentence(default)
    pooling = default
    layers: list[Dense] = []
    for module in _modules(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = path / Path(str(module.get("path", ""))).name
        try:
            if kind == "Pooling":
                pooling = _pooling(_said(folder))
            elif kind == "Dense":
                layers.append(_dense(folder))
            elif kind not in ("Transformer", "Normalize"):
                raise _Unknown(f"its module {kind or module} is not known here")
        except _Unknown as unknown:
            return Sentence(refused=str(unknown))
    return Sentence(pooling, tuple(layers))


def _modules(file: Path) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} holds no list of modules")
    return modules


class _Unknown(Exception):
    """A part of a checkpoint's pipeline that nothing here computes."""


def _said(folder: Path) -> dict[str, Any]:
    """The configuration of the module in `folder`; one who copies checkpoints may not have looked into folders."""
    file = folder / "config.json"
    if not file.is_file():
        raise _Unknown(f"{folder.name}/{file.name} is missing")
    return read_json(file)


def _pooling(said: Mapping[str, Any]) -> Pooling:
    named = [_FIELDS.get(name, name) for name, on in said.items() if name.startswith("pooling_mode_") and on]
    named = named or [str(said.get("pooling_mode", ""))]
    if len(named) != 1 or named[0] not in _POOLINGS:
        raise _Unknown(f"its pooling {' with '.join(named) or 'of no kind'} is not known here")
    return _POOLINGS[named[0]]


def _dense(folder: Path) -> Dense:
    said = _said(folder)
    activation = str(said.get("activation_function", "")).rpartition(".")[2] or "Identity"
    if activation not in _ACTIVATIONS:
        raise _Unknown(f"the activation {activation} of its dense layer is not known here")
    try:
        given = mx.load(str(folder / "model.safetensors"))
        assert isinstance(given, dict), "safetensors are named"
        weight, bias = given["linear.weight"], given.get("linear.bias")
    except (OSError, RuntimeError, KeyError) as error:
        raise ModelError(f"the dense layer {folder} cannot be read: {error}") from error
    layer = Dense(
        weight.astype(mx.float32),
        None if bias is None else bias.astype(mx.float32),
        _ACTIVATIONS[activation],
    )
    mx.eval(layer.weight, [] if layer.bias is None else layer.bias)
    return layer
