"""The safetensors format, as it is written here: a header that the shapes alone decide, then each array's bytes.

So a file can be begun before any array is known, and filled one array at a time. No MLX here.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping

Spec = tuple[str, str, tuple[int, ...]]  # an array's name, type as the format calls it, and shape

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U64": 8, "I64": 8, "U32": 4, "I32": 4, "U16": 2, "I16": 2, "U8": 1,
    "I8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip


def head(specs: Iterable[Spec]) -> tuple[bytes, Mapping[str, int]]:
    """What a file of these arrays begins with, and by each array's name the byte at which its data starts."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    starts, end = {}, 0
    for name, kind, shape in specs:
        start, end = end, end + ITEM_BYTES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begun = struct.pack("<Q", len(text)) + text
    return begun, {name: len(begun) + start for name, start in starts.items()}
