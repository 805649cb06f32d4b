"""BERT and its kin, RoBERTa and XLM-R among them: learned positions, norms behind the blocks.

After Devlin et al. 2018 (arXiv 1810.04805); names of weights are those of transformers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.encoder.encoder import Encoder, attended
from engine.errors import UnsupportedModel

# Families whose positions begin behind the id of padding.
BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
FAMILIES = ("bert", *BEHIND_PADDING)

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
}
_NAMES = {
    "attention.self.": "",
    "attention.output.dense": "projection",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
    "encoder.layer.": "layers.",
    "embeddings.LayerNorm": "norm",
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
}
_OTHERS = re.compile(r"^(pooler|cls|lm_head|classifier|qa_outputs)\.|position_ids$")


@dataclass
class Arguments:
    """What `config.json` says."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Arguments":
        """Raises UnsupportedModel for what is not known here."""
        known = {field.name for field in fields(cls)}
        arguments = cls(**{name: value for name, value in said.items() if name in known and value is not None})
        if arguments.position_embedding_type != "absolute":
            raise UnsupportedModel(
                f"an encoder with {arguments.position_embedding_type} positions is not supported"
            )
        return arguments

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1 if self.model_type in BEHIND_PADDING else 0


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and two linear layers, each added to what it was given and then normed."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        size, inner = arguments.hidden_size, arguments.intermediate_size
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.projection = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, arguments.layer_norm_eps)
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        self.norm = nn.LayerNorm(size, arguments.layer_norm_eps)
        self._activation = activation_named(arguments.hidden_act)
        self._num_heads = arguments.num_attention_heads
        self._scale = (size // arguments.num_attention_heads) ** -0.5

    def __call__(self, states: mx.array, lengths: Sequence[int]) -> mx.array:
        rows = attended(
            self.query(states), self.key(states), self.value(states), self._num_heads, lengths, self._attend
        )
        states = self.attention_norm(states + self.projection(rows))
        behind: mx.array = self.norm(states + self.down(self._activation(self.up(states))))
        return behind

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._scale)


class Bert(Encoder):
    """The whole of it, without what is put on top for other ends."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        size = arguments.hidden_size
        self.args = arguments
        self.context_length = arguments.max_position_embeddings - arguments.first_position
        self.words = nn.Embedding(arguments.vocab_size, size)
        self.positions = nn.Embedding(arguments.max_position_embeddings, size)
        self.types = nn.Embedding(arguments.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, arguments.layer_norm_eps)
        self.layers = [Layer(arguments) for _ in range(arguments.num_hidden_layers)]

    def states(self, ids: mx.array, lengths: Sequence[int]) -> mx.array:
        first = self.args.first_position
        positions = mx.concatenate([mx.arange(first, first + length) for length in lengths])[None]
        states = self.norm(self.words(ids) + self.positions(positions) + self.types(mx.zeros_like(ids)))
        for layer in self.layers:
            states = layer(states, lengths)
        behind: mx.array = states
        return behind

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weights by the names that they have here."""
        return {named: array for name, array in weights.items() if (named := _name(name))}


def activation_named(name: str) -> Callable[[mx.array], mx.array]:
    """The activation that a configuration calls `name`. Raises UnsupportedModel."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"an encoder with the activation {name} is not supported")
    return _ACTIVATIONS[name]


def _name(name: str) -> str:
    """The name here of the weight `name`; empty for one of no use."""
    name = re.sub(r"^(bert|roberta)\.", "", name).replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    if _OTHERS.search(name):
        return ""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
