"""How a model is split over ranks: by tensors or by layers, as its mlx-lm class can and its sizes allow.

What cannot be is refused here by name, from the configuration and before anything is sent: mlx-lm divides without
looking, and what comes of it fails far from the cause. Weights are not read until each rank holds its part alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.errors import ConfigError, UnsupportedModel, words_of
from engine.model.load import text_config

Kind = Literal["tensor", "pipeline"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # the first is preferred
# What tensor parallelism divides among ranks, by its name in configurations. Heads are counted down unseen; what a
# size that does not divide is good for shows when it is tried.
HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True, slots=True)
class Split:
    """How the model of the `family` is split over `num_ranks`."""

    kind: Kind
    num_ranks: int
    family: str

    @property
    def in_turn(self) -> bool:
        """Whether rows run one after the other: what ranks send each other as parts of two rows' graphs comes in
        no order that they agree on.
        """
        return self.kind == "pipeline"

    @property
    def note(self) -> str:
        how = "tensor parallel" if self.kind == "tensor" else "pipeline of layers"
        can = "shards" if self.kind == "tensor" else "pipelines"
        return f"ranks: {self.num_ranks}, {how} ({self.family} {can})"

    def apply(self, model: Any, group: Any) -> None:
        """Leave in `model`, whose weights are not read, the part of this process in MLX's `group`.

        Raises UnsupportedModel where a layer cannot be cut.
        """
        try:
            if self.kind == "tensor":
                model.shard(group)
            else:
                model.model.pipeline(group)
        except Exception as fault:  # a model's own code may raise anything
            said = f"{self.family} cannot be split over {self.num_ranks} ranks: {words_of(fault)}"
            raise UnsupportedModel(said) from fault


def split_of(model: Any, config: Mapping[str, Any], num_ranks: int, wanted: str) -> Split:
    """The split of `model`, whose checkpoint says `config`: the one that is `wanted`, or with `auto` by tensors if
    that can be and by layers if not. The model is tried on, not to be used again.

    Raises ConfigError for a wanted split that cannot be, else UnsupportedModel.
    """
    family = str(config.get("model_type"))
    refusals = {"tensor": _no_tensors(model, config, num_ranks), "pipeline": _no_pipeline(model, num_ranks)}
    can = [kind for kind in KINDS if refusals[kind] is None]
    for kind in can:
        if wanted in ("auto", kind):
            return Split(kind, num_ranks, family)
    if wanted == "auto":
        reasons = "; ".join(f"{kind}: {refusals[kind]}" for kind in KINDS)
        raise UnsupportedModel(f"{family} cannot be split over {num_ranks} ranks ({reasons})")
    said = f"{family} has no {wanted} split over {num_ranks} ranks: {refusals[wanted]}"
    raise ConfigError("split", said, hint=f"--split {can[0]} can be" if can else "")


def _no_tensors(model: Any, config: Mapping[str, Any], num_ranks: int) -> str | None:
    """Why the model's tensors cannot be divided among so many ranks, or None."""
    if not hasattr(model, "shard"):
        return "its mlx-lm class does not shard"
    said = text_config(dict(config))
    if uneven := _uneven(model, said, HEADS, num_ranks):
        return uneven
    try:
        model.shard(_NoRanks(num_ranks))
    except Exception as fault:  # noqa: BLE001 - a model's own code may raise anything, and says what does not divide
        return "; ".join(filter(None, [_uneven(model, said, SIZES, num_ranks), words_of(fault)]))
    return None


def _uneven(model: Any, said: Mapping[str, Any], names: Iterable[str], num_ranks: int) -> str:
    """Which of what a configuration counts by these `names` cannot be divided evenly, or nothing.

    A family's arguments tell which of them are its own: a checkpoint may say more.
    """
    arguments = getattr(model, "args", None)
    own = {name for name in said if hasattr(arguments, name) or hasattr(arguments, "text_config")}
    if said.get("kv_lora_rank") and "kv_lora_rank" in own:  # latent attention has no heads of keys
        own.discard("num_key_value_heads")
    counted = {name: said[name] for name in names if name in own and isinstance(said[name], int)}
    uneven = [f"{name} is {count}" for name, count in counted.items() if count % num_ranks]
    return f"{', '.join(uneven)}, which {num_ranks} does not divide" if uneven else ""


def _no_pipeline(model: Any, num_ranks: int) -> str | None:
    """Why the model's layers cannot be dealt to so many ranks, or None."""
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "pipeline"):
        return "its mlx-lm class does not pipeline"
    num_layers = len(inner.layers)
    return f"it has {num_layers} layers" if num_layers < num_ranks else None


@dataclass(frozen=True, slots=True)
class _NoRanks:
    """Stands for a group of MLX's while shapes are tried: it answers, and sends nothing."""

    num_ranks: int

    def rank(self) -> int:
        return self.num_ranks - 1

    def size(self) -> int:
        return self.num_ranks
