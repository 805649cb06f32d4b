import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

from engine.model.packing import BITS, KEPT_BITS, REQUANTIZED_BITS, pack, quantize

# Where a block of each kind keeps its half-precision numbers; every other byte may hold anything.
HALVES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q5_K: (0, 2),
    Kind.Q8_0: (0,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}  # fmt: skip


def random_blocks(kind: Kind, rows: int, blocks: int) -> np.ndarray:
    """Blocks with every code and with scales of any size, subnormal ones included."""
    random = np.random.default_rng(int(kind))
    made = random.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    sizes = 10.0 ** random.integers(-7, 3, (rows, blocks))
    for at in HALVES[kind]:
        halves = (random.standard_normal((rows, blocks)) * sizes).astype("<f2")
        made[..., at : at + 2] = halves[..., None].view(np.uint8)
    return made.reshape(rows, -1)


def unpacked(blocks: np.ndarray, kind: Kind) -> np.ndarray:
    """What MLX reads out of the packed blocks."""
    words, scales, biases = (mx.array(array) for array in pack(blocks, kind))
    said = mx.dequantize(words, scales, biases, group_size=32, bits=BITS[kind])
    assert said.dtype == mx.float32
    return np.array(said)


@pytest.mark.parametrize("kind", KEPT_BITS)
def test_packed_weights_are_the_values_of_the_gguf(kind: Kind) -> None:
    blocks = random_blocks(kind, rows=33, blocks=5)
    np.testing.assert_array_equal(unpacked(blocks, kind), quants.dequantize(blocks, kind))


@pytest.mark.parametrize("kind", REQUANTIZED_BITS)
def test_what_is_quantized_again_stays_within_a_step(kind: Kind) -> None:
    blocks = random_blocks(kind, rows=33, blocks=5)
    meant = quants.dequantize(blocks, kind)
    groups = meant.reshape(len(meant), -1, 32)
    reach = np.repeat(groups.max(-1) - groups.min(-1), 32, axis=1)
    assert (np.abs(unpacked(blocks, kind) - meant) <= np.maximum(reach / 255, 1e-7)).all()


EDGES = {
    "both signs": np.random.default_rng(0).standard_normal((400, 128)),
    "one sign": np.abs(np.random.default_rng(1).standard_normal((40, 128))),
    "tiny": np.random.default_rng(2).standard_normal((40, 128)) * 1e-8,
    "zero": np.zeros((2, 64)),
    "one value": np.full((2, 64), -3.5),
}


@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_quantizing_is_what_mlx_does(values: np.ndarray) -> None:
    values = values.astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(values), group_size=32, bits=8)
    codes = np.array(words).view(np.uint8).reshape(len(values), -1, 32)
    for ours, theirs in zip(quantize(values), (codes, scales, biases), strict=True):
        np.testing.assert_array_equal(ours, np.array(theirs))
