"""What each layer of a model keeps for a row. Plain values; where they come from is `adapter.py`'s business."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`full` keeps every key and value, `window` the last `window` of them, `other` is known to mlx-lm alone."""

    name: Literal["full", "window", "other"]
    window: int = 0
    cache_class: str = ""

    @property
    def is_attention(self) -> bool:
        """Whether plain keys and values are all that the layer keeps."""
        return self.name != "other"
