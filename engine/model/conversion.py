"""What can be asked of a conversion: plain values, checked before anything is fetched or loaded. No MLX here."""

from dataclasses import dataclass

from engine.errors import ConfigError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# mlx-lm's recipes, which give some layers more bits than others; with the fewer of the two.
MIXTURES = {"2_6": 2, "3_4": 3, "3_6": 3, "4_6": 4}
DEFAULT_BITS = 4
# How many times the source's perplexity is still taken for a success, by the fewest bits of a layer.
MOST_LOSS = {2: 10.0, 3: 3.0}
MOST_LOSS_ELSE = 1.5


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a checkpoint is to be written: with `bits` a weight, None for none packed, or by the recipe `mixed`.

    `dtype` is that of what is not packed, and of scales; None leaves it to the checkpoint. `max_loss` is how many
    times the source's perplexity the result's may be, None: by the bits. Without `measures` neither is looked at.

    Raises ConfigError for what MLX cannot pack.
    """

    bits: int | None = DEFAULT_BITS
    group_size: int = 64
    dtype: str | None = None
    mixed: str | None = None
    max_loss: float | None = None
    measures: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in BITS:
            raise ConfigError("bits", f"weights are quantized to {_either(BITS)} bits, not {self.bits}")
        if self.group_size not in GROUP_SIZES:
            said = f"weights share a scale in groups of {_either(GROUP_SIZES)}, not {self.group_size}"
            raise ConfigError("group_size", said)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError("dtype", f"the type is {_either(DTYPES)}, not {self.dtype}")
        if self.mixed is not None and self.mixed not in MIXTURES:
            raise ConfigError("mixed", f"the recipe is {_either(MIXTURES)}, not {self.mixed}")
        if self.max_loss is not None and not self.max_loss > 0:
            raise ConfigError("max_loss", f"the loss allowed is a factor above 0, not {self.max_loss}")

    @property
    def packs(self) -> bool:
        return self.bits is not None

    @property
    def suffix(self) -> str:
        """What a name says of it when nobody gives one."""
        if self.mixed is not None:
            return f"mixed-{self.mixed}"
        if self.bits is not None:
            return f"{self.bits}bit"
        return DTYPES[self.dtype] if self.dtype is not None else "dequantized"

    @property
    def said(self) -> str:
        """The same for people."""
        if self.bits is None:
            return "not quantized"
        bits = f"recipe {self.mixed}" if self.mixed is not None else f"{self.bits} bits"
        return f"{bits}, groups of {self.group_size}"

    @property
    def most_loss(self) -> float:
        """The largest factor between the perplexities that is a success."""
        if self.max_loss is not None:
            return self.max_loss
        fewest = MIXTURES[self.mixed] if self.mixed is not None else self.bits
        return MOST_LOSS_ELSE if fewest is None else MOST_LOSS.get(fewest, MOST_LOSS_ELSE)


def _either(choices: object) -> str:
    assert isinstance(choices, (tuple, dict))
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}"
