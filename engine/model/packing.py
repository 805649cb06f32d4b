"""GGUF's blocks of numbers as MLX's: packed codes, and a scale and a bias for every 32 of them.

MLX's affine form is w = scale * code + bias. Most GGUF kinds are that already, with one scale for 32 numbers, and
keep every value: codes are moved, scales and biases become float32, because a bias such as -128 * d need not be a
half-precision number. In float32 the product scale * code is exact, so `mx.dequantize` rounds as GGUF's own rule
does. Q2_K, Q3_K and Q6_K scale every 16 numbers, and IQ4 kinds look their values up: these are spread out and
quantized again, to 8 bits, by MLX's rule. No MLX here, no files and no names.
"""

from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

Array = np.ndarray[Any, np.dtype[Any]]

GROUP_SIZE = 32
KEPT_BITS = {
    Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q5_0: 8, Kind.Q5_1: 8, Kind.Q5_K: 8, Kind.Q8_0: 8,
}  # fmt: skip
REQUANTIZED_BITS = {Kind.Q2_K: 8, Kind.Q3_K: 8, Kind.Q6_K: 8, Kind.IQ4_NL: 8, Kind.IQ4_XS: 8}
BITS = KEPT_BITS | REQUANTIZED_BITS
SMALLEST_SCALE = np.float32(1e-7)


def pack(rows: Array, kind: Kind) -> tuple[Array, Array, Array]:
    """GGUF blocks `[rows, bytes per row]` as MLX's packed words (uint32), scales and biases (float32).

    Word k of a row holds elements 8k to 8k+7 (4 bits) or 4k to 4k+3 (8 bits), the first in the lowest bits.
    """
    rows = np.ascontiguousarray(rows)
    if kind in REQUANTIZED_BITS:
        codes, scales, biases = quantize(quants.dequantize(rows, kind))
    else:
        blocks = rows.reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
        codes, scales, biases = (_super_blocks if kind in (Kind.Q4_K, Kind.Q5_K) else _blocks)(blocks, kind)
    if BITS[kind] == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    words = np.ascontiguousarray(codes).reshape(len(rows), -1).view("<u4")
    return words, scales, biases


def quantize(values: Array) -> tuple[Array, Array, Array]:
    """Float32 `[rows, columns]` as 8-bit codes `[rows, groups, 32]`, scales and biases `[rows, groups]`.

    The rule of `mx.quantize`, bit for bit: the end of the range that is farther from zero is met exactly, and the
    scale is changed so that zero is.
    """
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    low, high = groups.min(-1), groups.max(-1)
    downward = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / np.float32(255), SMALLEST_SCALE)
    scales = np.where(downward, scales, -scales)
    edges = np.where(downward, low, high)
    steps = np.rint(edges / scales)
    scales = np.where(steps != 0, edges / np.where(steps != 0, steps, 1), scales).astype(np.float32)
    biases = np.where(steps != 0, edges, 0).astype(np.float32)
    codes = np.rint((groups - biases[..., None]) / scales[..., None])
    return np.clip(codes, 0, 255).astype(np.uint8), scales, biases


def _blocks(blocks: Array, kind: Kind) -> tuple[Array, Array, Array]:
    """Codes, scales and biases of the kinds with 32 numbers in a block: w = d * (q - middle), or d * q + m."""
    scales = _half(blocks, 0)
    if kind == Kind.Q8_0:
        return blocks[..., 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128)
    has_minimum, has_fifth_bits = kind in (Kind.Q4_1, Kind.Q5_1), kind in (Kind.Q5_0, Kind.Q5_1)
    middle = np.float32(-16 if has_fifth_bits else -8)
    biases = _half(blocks, 2) if has_minimum else scales * middle
    rest = blocks[..., 4 if has_minimum else 2 :]
    codes = _nibbles(rest[..., 4:] if has_fifth_bits else rest)
    if has_fifth_bits:
        codes = codes | (np.unpackbits(rest[..., :4], axis=-1, bitorder="little") << np.uint8(4))
    return codes, scales, biases


def _super_blocks(blocks: Array, kind: Kind) -> tuple[Array, Array, Array]:
    """The same of Q4_K and Q5_K: eight groups a block; scales and minima are 6-bit multiples of two halves."""
    num_rows, num_blocks, _ = blocks.shape
    multiples, minima = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (num_rows, num_blocks, 8)
    scales = _half(blocks, 0)[..., None] * multiples.astype(np.float32).reshape(shape)
    biases = -(_half(blocks, 2)[..., None] * minima.astype(np.float32).reshape(shape))
    codes = _nibbles(blocks[..., -128:].reshape(num_rows, num_blocks, 4, 32)).reshape(*shape, GROUP_SIZE)
    if kind == Kind.Q5_K:
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | ((blocks[..., None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4))
    groups = (num_rows, num_blocks * 8)
    return codes.reshape(*groups, GROUP_SIZE), scales.reshape(groups), biases.reshape(groups)


def _nibbles(packed: Array) -> Array:
    """The low halves of all bytes, then their high halves."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)


def _half(blocks: Array, at: int) -> Array:
    """The half-precision number at byte `at` of each block, as float32."""
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]
    return halves.astype(np.float32)
