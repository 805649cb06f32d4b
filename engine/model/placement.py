"""How a model's weights will lie in memory, decided before any is read, and laid so.

On a CPU, what nothing multiplies fast as it is turns to float32 where there is room. Room is what the operating
system says is free; where the weights came from is not known here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.errors import ModelError
from engine.kernels import leaves
from engine.model.memory import available_bytes, human_bytes

EXPANDED_SHARE = 0.75

# What takes the place of a packed layer, for its weight to be put into; of a rank's part, with the same group.
_UNPACKED: dict[type, Callable[[Any], Any]] = {
    QuantizedLinear: lambda packed: Linear(1, 1, bias=False),
    QuantizedEmbedding: lambda packed: Embedding(1, 1),
    QuantizedSwitchLinear: lambda packed: SwitchLinear(1, 1, 1, bias=False),
    QuantizedAllToShardedLinear: lambda packed: AllToShardedLinear(
        1, packed.group.size(), bias=False, group=packed.group
    ),
    QuantizedShardedToAllLinear: lambda packed: ShardedToAllLinear(
        packed.group.size(), 1, bias=False, group=packed.group
    ),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """How a model's weights will lie in memory. `packed` are its quantized layers by name.

    On a CPU the layers that nothing multiplies fast as they are (`unfit`; without the compiled kernels all of the
    packed ones) are expanded to float32 where that leaves room for what else is needed. `half_experts`: expert
    layers in half precision that are left to MLX's CPU backend, which cannot multiply them at all.

    `stored_bytes` is what the weights take as they are; `widened_bytes` what more they take once the few that the
    compiled kernels want in float32 are so; `expanded_bytes` what all of it takes with the unfit layers expanded.
    """

    packed: dict[str, Any]
    unfit: dict[str, Any]
    half_experts: bool
    slow: bool
    compiled: bool
    num_parameters: int
    free_bytes: int
    stored_bytes: int
    widened_bytes: int
    expanded_bytes: int

    @property
    def expands(self) -> bool:
        return bool(self.unfit) and self.slow and self.expanded_bytes <= EXPANDED_SHARE * self.free_bytes

    @property
    def widens(self) -> bool:
        return self.half_experts and self.slow and not self.packed

    @property
    def in_float32(self) -> bool:
        """Whether activations, and so keys and values, are float32 whatever the weights are."""
        return self.expands or self.widens or self.compiled

    @property
    def least_bytes(self) -> int:
        """What the weights take where nothing is expanded."""
        return self.stored_bytes + self.widened_bytes

    @property
    def num_bytes(self) -> int:
        return self.expanded_bytes if self.expands or self.widens else self.least_bytes


def placement(model: Any, *, compiled: bool = False) -> Placement:
    """How the weights of `model`, evaluated or not, will lie in memory, with the `compiled` kernels or without."""
    packed = packed_layers(model)
    left = {name: module for name, module in model.named_modules() if not (compiled and leaves.fits(module))}
    unfit = {name: module for name, module in packed.items() if name in left}
    stored_bytes, num_parameters = parameter_bytes(model), _num_parameters(model, packed)
    widened = [array for name in left.keys() - unfit.keys() for array in _own_floats(left[name]).values()]
    widened_bytes = sum(4 * array.size - array.nbytes for array in widened) if compiled else 0
    grown_bytes = sum(4 * _num_values(module) - _packed_bytes(module) for module in unfit.values())
    return Placement(
        packed=packed,
        unfit=unfit,
        half_experts=any(type(m) is SwitchLinear and m.weight.dtype != mx.float32 for m in left.values()),
        slow=mx.default_device() == mx.Device(mx.cpu),
        compiled=compiled,
        num_parameters=num_parameters,
        free_bytes=available_bytes(),
        stored_bytes=stored_bytes,
        widened_bytes=widened_bytes,
        expanded_bytes=stored_bytes + widened_bytes + grown_bytes if compiled else 4 * num_parameters,
    )


def place(model: Any, *, compiled: bool = False) -> str:
    """Evaluate the weights of `model` as its placement says; return the start-up line about them.

    With the `compiled` kernels its leaves are handed to them. Too large an allocation on a CPU kills the process,
    so ModelError is raised before it is tried.
    """
    decided = placement(model, compiled=compiled)
    return _place_for_kernels(model, decided) if compiled else _place_weights(model, decided)


def _place_weights(model: Any, place: Placement) -> str:
    packed, slow, free_bytes = place.packed, place.slow, place.free_bytes
    if slow:
        hold_room(place.stored_bytes, free_bytes)
    if not packed:
        said = _widen(model, place) if place.widens else ""
        _read(model)
        return f"weights: {_dtype_names(model)} ({human_bytes(parameter_bytes(model))}){said}"
    bits = _bits(packed.values())
    if place.expands:
        _expand(model, packed)
        model.set_dtype(mx.float32)
        _read(model)
        size = human_bytes(parameter_bytes(model))
        return f"weights: {bits}-bit, expanded to float32 ({size}): no quantized CPU kernel here"
    _read(model)
    said = f"weights: {bits}-bit ({human_bytes(parameter_bytes(model))})"
    if slow:
        said += f", slow: float32 would take {human_bytes(place.expanded_bytes)} of {human_bytes(free_bytes)} free"
    return said


def _read(model: Any) -> None:
    """Evaluate the weights one after the other: of what is read for a rank's part of one, the rest is let go."""
    for array in _arrays(model):
        mx.eval(array)


def _place_for_kernels(model: Any, place: Placement) -> str:
    """Hand the model's leaves to the compiled kernels, packed and half-precision weights as they are.

    What remains is for MLX's CPU operations and turned to float32, packed layers where there is room.
    """
    bits, modes, expands = _bits(place.packed.values()), _modes(place.unfit.values()), place.expands
    hold_room(place.least_bytes, place.free_bytes)
    if expands:
        _expand(model, place.unfit)
    leaves.replace(model)
    _widen_rest(model)
    mx.eval(model.parameters())
    leaves.lay_together(model)
    kind = f"{bits}-bit" if bits else _dtype_names(model)
    said = f"weights: {kind} ({human_bytes(parameter_bytes(model))}), activations float32"
    if modes:
        said += f", {modes} layers "
        said += "expanded to float32" if expands else "packed, slow: they do not fit expanded"
    return said


def _widen_rest(model: Any) -> None:
    """Turn what the compiled kernels do not run to float32, but for packed layers."""
    for module in model.modules():
        if not leaves.is_compiled(module) and type(module) not in _UNPACKED:
            module.update({name: array.astype(mx.float32) for name, array in _own_floats(module).items()})


def place_unread(model: Any, *, compiled: bool = False) -> None:
    """Lay the weights of `model` for a single forward that reads each where it wants it: none is evaluated here.

    What is multiplied is what `place` would have it be where there is room.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    layers = packed_layers(model)
    unfit = {name: layer for name, layer in layers.items() if not (compiled and leaves.fits(layer))}
    model.update_modules(tree_unflatten([(name, unpacked(layer)) for name, layer in unfit.items()]))
    if compiled:
        leaves.replace(model)
        _widen_rest(model)
    else:
        model.set_dtype(mx.float32)
    model.eval()


def packed_layers(model: Any) -> dict[str, Any]:
    """The quantized layers of `model` that can be unpacked, by name."""
    return {name: module for name, module in model.named_modules() if type(module) in _UNPACKED}


def unpacked(layer: Any) -> Any:
    """A float32 layer in place of the packed `layer`, not evaluated yet."""
    plain = _UNPACKED[type(layer)](layer)
    plain.weight = expanded_weight(layer)
    if "bias" in layer:
        plain.bias = layer.bias
    return plain


def _own_floats(module: Any) -> dict[str, mx.array]:
    """The parameters that are the module's own, not its parts', and not whole numbers."""
    return {
        name: value
        for name, value in module.items()
        if isinstance(value, mx.array) and not name.startswith("_") and mx.issubdtype(value.dtype, mx.floating)
    }


def hold_room(needed_bytes: int, free_bytes: int) -> None:
    """Raise ModelError where weights of `needed_bytes` do not fit into `free_bytes`."""
    if needed_bytes > free_bytes:
        raise ModelError(
            f"the weights take {human_bytes(needed_bytes)} and {human_bytes(free_bytes)} of memory are free",
            hint="choose a smaller model, or the same one with fewer bits",
        )


def _bits(packed: Iterable[Any]) -> str:
    return "- and ".join(str(width) for width in sorted({module.bits for module in packed}))


def _modes(packed: Iterable[Any]) -> str:
    return " and ".join(sorted({module.mode for module in packed}))


def _widen(model: Any, place: Placement) -> str:
    """Turn every weight to float32: MLX's CPU backend multiplies experts in no other type. Returns the note."""
    if place.expanded_bytes > EXPANDED_SHARE * place.free_bytes:
        raise ModelError(
            f"experts run in float32 alone on a CPU, where the weights take {human_bytes(place.expanded_bytes)} "
            f"and {human_bytes(place.free_bytes)} of memory are free",
            hint="choose a smaller model, or a quantized one",
        )
    model.set_dtype(mx.float32)
    return ", widened: a CPU multiplies experts in float32 alone"


def _expand(model: Any, packed: dict[str, Any]) -> None:
    """Replace every packed layer by a float32 one, evaluated alone so that its packed form is freed at once."""
    for name in list(packed):
        layer = unpacked(packed.pop(name))
        mx.eval(layer.parameters())
        model.update_modules(tree_unflatten([(name, layer)]))
    model.eval()


def expanded_weight(module: Any) -> mx.array:
    """The values that the packed weight stands for: scales are widened first, so nothing is rounded to half."""
    scales, biases = module.scales, module.get("biases")
    if module.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(
        module.weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )


def _num_parameters(model: Any, packed: dict[str, Any]) -> int:
    """How many values the weights stand for."""
    return sum(array.size for array in _arrays(model)) + sum(
        _num_values(module) - sum(array.size for array in _packed_arrays(module)) for module in packed.values()
    )


def _num_values(module: Any) -> int:
    """How many values a packed layer's weight stands for."""
    count: int = module.weight.size * 32 // module.bits
    return count


def _packed_arrays(module: Any) -> list[mx.array]:
    """The arrays that a packed layer's expanded weight takes the place of."""
    names = ("weight", "scales", "biases", "global_scale")
    return [array for name in names if (array := module.get(name)) is not None]


def _packed_bytes(module: Any) -> int:
    return sum(array.nbytes for array in _packed_arrays(module))


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def parameter_bytes(model: Any) -> int:
    """What the weights of `model` take as they are."""
    return sum(array.nbytes for array in _arrays(model))


def _dtype_names(model: Any) -> str:
    names = {str(array.dtype).removeprefix("mlx.core.") for array in _arrays(model)}
    return " and ".join(sorted(names))
