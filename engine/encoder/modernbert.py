"""ModernBERT: rotary positions, norms before the blocks, and windows in two layers of three.

After Warner et al. 2024 (arXiv 2412.13663); names of weights are those of transformers, but for their parts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from engine.encoder.bert import activation_named
from engine.encoder.encoder import Encoder, attended, within
from engine.errors import UnsupportedModel

FAMILIES = ("modernbert",)
FULL, WINDOW = "full_attention", "sliding_attention"

_OTHERS = re.compile(r"^(head|decoder|classifier)\.")


@dataclass
class Arguments:
    """What `config.json` says. `thetas` are the bases of the rotations, by the layers' kinds."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_activation: str = "gelu"
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    global_rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0
    layer_types: Sequence[str] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Arguments":
        """Raises UnsupportedModel for what is not known here."""
        known = {field.name for field in fields(cls)}
        arguments = cls(**{name: value for name, value in said.items() if name in known and value is not None})
        kinds = {
            str((arguments.rope_parameters or {}).get(kind, {}).get("rope_type", "default"))
            for kind in (FULL, WINDOW)
        }
        if arguments.rope_scaling is not None or kinds != {"default"}:
            raise UnsupportedModel("an encoder with scaled rotary positions is not supported")
        return arguments

    def kind(self, layer: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[layer]
        return WINDOW if layer % self.global_attn_every_n_layers else FULL

    def theta(self, kind: str) -> float:
        default = self.global_rope_theta if kind == FULL else self.local_rope_theta
        return float((self.rope_parameters or {}).get(kind, {}).get("rope_theta", default))


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a gated linear unit, each over what is normed before it; the first is given what is."""

    def __init__(self, arguments: Arguments, number: int) -> None:
        super().__init__()
        size, inner = arguments.hidden_size, arguments.intermediate_size
        if number:
            self.attn_norm = nn.LayerNorm(size, arguments.norm_eps, bias=arguments.norm_bias)
        self.wqkv = nn.Linear(size, 3 * size, bias=arguments.attention_bias)
        self.wo = nn.Linear(size, size, bias=arguments.attention_bias)
        self.mlp_norm = nn.LayerNorm(size, arguments.norm_eps, bias=arguments.norm_bias)
        self.up = nn.Linear(size, 2 * inner, bias=arguments.mlp_bias)
        self.down = nn.Linear(inner, size, bias=arguments.mlp_bias)
        self._activation = activation_named(arguments.hidden_activation)
        self._num_heads = arguments.num_attention_heads
        self._head_dim = size // arguments.num_attention_heads
        kind = arguments.kind(number)
        self._theta, self._window = arguments.theta(kind), arguments.local_attention if kind == WINDOW else None

    def __call__(self, states: mx.array, lengths: Sequence[int]) -> mx.array:
        normed = self.attn_norm(states) if "attn_norm" in self else states
        queries, keys, values = mx.split(self.wqkv(normed), 3, axis=-1)
        rows = attended(queries, keys, values, self._num_heads, lengths, self._attend)
        states = states + self.wo(rows)
        given, gate = mx.split(self.up(self.mlp_norm(states)), 2, axis=-1)
        behind: mx.array = states + self.down(self._activation(given) * gate)
        return behind

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        queries, keys = (
            mx.fast.rope(one, self._head_dim, traditional=False, base=self._theta, scale=1.0, offset=0)
            for one in (queries, keys)
        )
        mask = within(queries.shape[2], self._window)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._head_dim**-0.5, mask=mask)


class ModernBert(Encoder):
    """The whole of it, without what is put on top for other ends."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        size = arguments.hidden_size
        self.args = arguments
        self.words = nn.Embedding(arguments.vocab_size, size)
        self.norm = nn.LayerNorm(size, arguments.norm_eps, bias=arguments.norm_bias)
        self.layers = [Layer(arguments, number) for number in range(arguments.num_hidden_layers)]
        self.final_norm = nn.LayerNorm(size, arguments.norm_eps, bias=arguments.norm_bias)

    def states(self, ids: mx.array, lengths: Sequence[int]) -> mx.array:
        states = self.norm(self.words(ids))
        for layer in self.layers:
            states = layer(states, lengths)
        normed: mx.array = self.final_norm(states)
        return normed

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weights by the names that they have here."""
        return {named: array for name, array in weights.items() if (named := _name(name))}


def _name(name: str) -> str:
    """The name here of the weight `name`; empty for one of no use."""
    name = name.removeprefix("model.")
    if _OTHERS.search(name):
        return ""
    for theirs, ours in {
        "embeddings.tok_embeddings": "words",
        "embeddings.norm": "norm",
        "attn.Wqkv": "wqkv",
        "attn.Wo": "wo",
        "mlp.Wi": "up",
        "mlp.Wo": "down",
    }.items():
        name = name.replace(theirs, ours)
    return name
