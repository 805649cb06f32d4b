"""The leaves of an unmodified mlx-lm model, run by the compiled kernels.

A leaf's class is replaced by a subclass of it when the model is loaded; its names and weights stay what they are,
and its outputs are float32. Which leaves: linear layers, embeddings and layers of experts, plain or packed in the
affine layout.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.kernels import functions, native

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
WEIGHTS = ("weight", "scales", "biases")
TOGETHER_BYTES = 32 << 20


class CompiledLinear(Linear):  # type: ignore[misc]
    """y = x·Wᵀ + b."""

    def __call__(self, x: mx.array) -> mx.array:
        return native.linear(x, self["weight"], None, None, self.get("bias"))


class CompiledQuantizedLinear(QuantizedLinear):  # type: ignore[misc]
    """y = x·Wᵀ + b, the weight packed."""

    def __call__(self, x: mx.array) -> mx.array:
        return native.linear(
            x, self["weight"], self["scales"], self["biases"], self.get("bias"), self.group_size, self.bits
        )


class CompiledEmbedding(Embedding):  # type: ignore[misc]
    """A row of the weight for each token, or a head."""

    def __call__(self, ids: mx.array) -> mx.array:
        return native.embed(ids, self["weight"])

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self["weight"])


class CompiledQuantizedEmbedding(QuantizedEmbedding):  # type: ignore[misc]
    """A row of the packed weight for each token, or a head."""

    def __call__(self, ids: mx.array) -> mx.array:
        return native.embed(ids, self["weight"], self["scales"], self["biases"], self.group_size, self.bits)

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self["weight"], self["scales"], self["biases"], None, self.group_size, self.bits)


class CompiledSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """y = x·Wᵀ + b, W and b those of the expert that `indices` name."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return native.gather_linear(x, self["weight"], indices, None, None, self.get("bias"))


class CompiledQuantizedSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """y = x·Wᵀ + b, W and b those of the expert that `indices` name, W packed."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        packed = self["scales"], self["biases"], self.get("bias"), self.group_size, self.bits
        return native.gather_linear(x, self["weight"], indices, *packed)


COMPILED: dict[type, type] = {
    Linear: CompiledLinear,
    Embedding: CompiledEmbedding,
    QuantizedLinear: CompiledQuantizedLinear,
    QuantizedEmbedding: CompiledQuantizedEmbedding,
    SwitchLinear: CompiledSwitchLinear,
    QuantizedSwitchLinear: CompiledQuantizedSwitchLinear,
}


def replace(model: Any) -> None:
    """Let every leaf of `model` that the kernels can run be run by them; the others stay as they are."""
    for module in model.modules():
        if fits(module):
            module.__class__ = COMPILED[type(module)]
            for name in WEIGHTS:
                if name in module:
                    module[name] = mx.contiguous(module[name])
    functions.use_while_called(model)


def lay_together(model: Any) -> None:
    """Move the evaluated weights of the compiled leaves into common buffers, scales as halves where they are such.

    Some at a time, for both exist meanwhile.
    """
    waiting: list[tuple[Any, str]] = []
    waiting_bytes = 0
    for module in filter(is_compiled, model.modules()):
        _narrow(module)
        for name in WEIGHTS:
            if name in module:
                waiting.append((module, name))
                waiting_bytes += module[name].nbytes
        if waiting_bytes >= TOGETHER_BYTES:
            _move(waiting)
            waiting, waiting_bytes = [], 0
    _move(waiting)


def _narrow(module: Any) -> None:
    """Keep scales and biases in half precision where that loses nothing: a step reads them all.

    Those of imported GGUF blocks are halves by origin (docs/decisions/003-gguf-scales-in-float32.md).
    """
    wide = [module[name] for name in ("scales", "biases") if name in module]
    if len(wide) < 2 or any(array.dtype != mx.float32 for array in wide):
        return
    half = [array.astype(mx.float16) for array in wide]
    if all(mx.array_equal(narrow.astype(mx.float32), array) for narrow, array in zip(half, wide, strict=True)):
        module["scales"], module["biases"] = half


def _move(weights: Sequence[tuple[Any, str]]) -> None:
    moved = native.lay_together([module[name] for module, name in weights])
    for (module, name), array in zip(weights, moved, strict=True):
        module[name] = array


def is_compiled(module: Any) -> bool:
    """Whether the kernels run `module`."""
    return isinstance(module, tuple(COMPILED.values()))


def fits(module: Any) -> bool:
    """Whether the kernels can run `module`, one of the kinds above, with the weights that it has."""
    if type(module) not in COMPILED:
        return False
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding, QuantizedSwitchLinear)):
        return (
            module.mode == "affine"
            and module.bits in BITS
            and module.group_size in GROUP_SIZES
            and module.scales.dtype in FLOATS
            and module.get("global_scale") is None
        )
    num_axes = 3 if isinstance(module, SwitchLinear) else 2
    return module.weight.dtype in FLOATS and module.weight.ndim == num_axes
