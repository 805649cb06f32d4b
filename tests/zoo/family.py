"""What is said of one family of the zoo, and the words its configurations share."""

from dataclasses import dataclass, field
from typing import Any

WINDOW = 8
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Cut:
    """Why a cut changes bits, and by how much at most, relative to the largest logit; None: other tokens too."""

    because: str
    tolerance: float | None = 1e-5


SCAN = Cut("the state-space scan adds several tokens up in chunks")
LATENT = Cut("latent attention takes a shorter way for one token")
DYNAMIC = Cut("the rotary base follows the last position of a piece", None)


@dataclass(frozen=True)
class Family:
    """`config` beyond what all share, and the `mode` in which the probe finds that the family can be run.

    `cut` is for a family where a prompt cut into pieces gives other bits than the whole. With `bits`, what can be
    packed is, in groups of 32 values.
    `steps`: mlx-lm gives what we give only where the prompt goes in token by token, for the reason named.
    """

    config: dict[str, Any] = field(default_factory=dict)
    mode: str = "spans"
    cut: Cut | None = None
    steps: str = ""
    bits: int = 0


def text(**config: Any) -> dict[str, Any]:
    """The configuration of a family that nests its language model's."""
    return {"text_config": config}
