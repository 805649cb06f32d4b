"""What each layer of a model keeps for a row. Plain values; where they come from is `adapter.py`'s business."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`full` keeps every key and value, `window` the last `window` of them, `state` a recurrent state of `size`
    arrays, `list` several `parts`; `other` is known to mlx-lm alone.
    """

    name: Literal["full", "window", "state", "list", "other"]
    window: int = 0
    size: int = 0
    parts: "tuple[LayerKind, ...]" = ()
    cache_class: str = ""

    @property
    def words(self) -> str:
        """What it keeps, such as `full`, `window 512`, `state 2`."""
        size = self.window or self.size
        return f"{self.name} {size}" if size else self.name

    @property
    def is_attention(self) -> bool:
        """Whether plain keys and values are all that the layer keeps."""
        if self.name == "list":
            return all(part.is_attention for part in self.parts)
        return self.name in ("full", "window")

    @property
    def has_attention(self) -> bool:
        """Whether plain keys and values are among what the layer keeps."""
        return self.is_attention or any(part.has_attention for part in self.parts)

    @property
    def is_known(self) -> bool:
        """Whether the layer's state can be kept outside mlx-lm's own caches."""
        return self.name != "other" and all(part.is_known for part in self.parts)


def leaf_kinds(kinds: Sequence[LayerKind]) -> Iterator[LayerKind]:
    """Every kind that is not a list, parts of lists included, in their order."""
    for kind in kinds:
        if kind.parts:
            yield from leaf_kinds(kind.parts)
        else:
            yield kind
