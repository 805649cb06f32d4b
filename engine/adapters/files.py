"""An adapter's folder into low-rank factors for the layers of a model, checked before anything is changed.

Two formats are read: mlx-lm's, and PEFT's for LoRA. What cannot be chosen row by row is refused by its name: whole
weights, embeddings, heads, experts.
"""

import math
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from engine.adapters.layer import Factors
from engine.errors import AdapterError, ModelError, words_of
from engine.model.placement import expanded_weight
from engine.model.store import read_json

CONFIG = "adapter_config.json"
OURS, PEFT = "adapters.safetensors", "adapter_model.safetensors"
FOLDER_HINT = "an adapter is a folder that `mlx_lm.lora` or PEFT wrote, for this very model"
MAX_ECHOED = 100  # characters of what is wrong
WHOLE_HINT = "--adapter applies such a one to the whole model when it is loaded"
PEFT_PREFIX = "base_model.model."
# The tensors of a layer in each format, and what they are here.
MLX_PARTS = {"lora_a": "down", "lora_b": "up", "m": "magnitude"}
PEFT_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# What PEFT may have done beside: such values alone change nothing.
PEFT_PLAIN = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """What the files say of one layer, unread: `down` `[rank, inputs]`, `up` `[outputs, rank]`, `magnitude`
    `[outputs]`, whose presence makes it DoRA.
    """

    down: mx.array
    up: mx.array
    magnitude: mx.array | None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder's pairs by the names of their layers, all of one `rank`. `scale` is that of all products; `exact`:
    the names are mlx-lm's, else they may be the ends of such.
    """

    folder: Path
    pairs: Mapping[str, Pair]
    rank: int
    scale: float
    exact: bool


def read(folder: Path) -> AdapterFiles:
    """What the folder has, its weights not read yet. Raises AdapterError."""
    if not os.path.isfile(folder / CONFIG):  # False for what may not be looked at, too
        raise AdapterError(f"{folder} is no adapter: {CONFIG} is missing", hint=FOLDER_HINT)
    try:
        said = read_json(folder / CONFIG)
    except ModelError as error:
        raise AdapterError(str(error), hint=FOLDER_HINT) from error
    if "peft_type" in said:
        return _read_peft(folder, said)
    kind = said.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(
            f"{folder} has {'whole' if kind == 'full' else repr(kind)} weights, which are no row's own",
            hint=WHOLE_HINT if kind == "full" else FOLDER_HINT,
        )
    parameters = said.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{folder} is no adapter of mlx-lm: it has no lora_parameters", hint=FOLDER_HINT)
    scale = _number(folder, "scale", parameters.get("scale"))
    rank = _rank(folder, "rank", parameters.get("rank"))
    pairs = _pairs(folder, _arrays(folder / OURS), MLX_PARTS)
    turned = {name: Pair(pair.down.T, pair.up.T, pair.magnitude) for name, pair in pairs.items()}
    return _checked(AdapterFiles(folder, turned, rank, scale, exact=True), dora=kind == "dora")


def _read_peft(folder: Path, said: Mapping[str, Any]) -> AdapterFiles:
    if said["peft_type"] != "LORA":
        raise AdapterError(f"{folder} is a {said['peft_type']} of PEFT, and LORA alone is read", hint=FOLDER_HINT)
    for name, plain in PEFT_PLAIN.items():
        if said.get(name) is not None and said[name] not in plain:
            raise AdapterError(f"{folder}: {name} {said[name]} of PEFT is not supported", hint=FOLDER_HINT)
    rank, alpha = _rank(folder, "r", said.get("r")), _number(folder, "lora_alpha", said.get("lora_alpha"))
    arrays = {name.removeprefix(PEFT_PREFIX): array for name, array in _arrays(folder / PEFT).items()}
    scale = alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)
    files = AdapterFiles(folder, _pairs(folder, arrays, PEFT_PARTS), rank, scale, exact=False)
    return _checked(files, dora=bool(said.get("use_dora")))


def _number(folder: Path, name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        said = repr(value)[:MAX_ECHOED]
        raise AdapterError(f"{folder}: {name} is {said} in {CONFIG}, which is no number", hint=FOLDER_HINT)
    return number


def _rank(folder: Path, name: str, value: Any) -> int:
    rank = _number(folder, name, value)
    if rank < 1 or rank != int(rank):
        raise AdapterError(f"{folder}: {name} is {value!r} in {CONFIG}, which is no rank", hint=FOLDER_HINT)
    return int(rank)


def _arrays(file: Path) -> dict[str, mx.array]:
    if not os.path.isfile(file):
        raise AdapterError(f"{file.parent} is no whole adapter: {file.name} is missing", hint=FOLDER_HINT)
    try:
        return dict(mx.load(str(file)))  # type: ignore[arg-type]
    except Exception as error:  # a damaged file can make it raise anything
        raise AdapterError(f"{file} cannot be read: {words_of(error, 300)}", hint=FOLDER_HINT) from error


def _pairs(folder: Path, arrays: Mapping[str, mx.array], parts: Mapping[str, str]) -> dict[str, Pair]:
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        ends = [end for end in parts if name.endswith(f".{end}")]
        if not ends:
            raise AdapterError(
                f"{folder} has {name}, which is no low-rank weight of a linear layer", hint=WHOLE_HINT
            )
        end = max(ends, key=len)
        found.setdefault(name.removesuffix(f".{end}"), {})[parts[end]] = array
    for layer, of_layer in found.items():
        for part in ("down", "up"):
            if part not in of_layer:
                missing = next(end for end, what in parts.items() if what == part)
                raise AdapterError(f"{folder} has no {layer}.{missing}", hint=FOLDER_HINT)
    return {
        layer: Pair(of_layer["down"], of_layer["up"], of_layer.get("magnitude"))
        for layer, of_layer in found.items()
    }


def _checked(files: AdapterFiles, *, dora: bool) -> AdapterFiles:
    if not files.pairs:
        raise AdapterError(f"{files.folder} has no weights", hint=FOLDER_HINT)
    for layer, pair in files.pairs.items():
        if (pair.magnitude is not None) != dora:
            has = "no magnitudes" if dora else "magnitudes, and is no DoRA"
            raise AdapterError(f"{files.folder}: {layer} has {has}", hint=FOLDER_HINT)
    return files


def layers_for(files: AdapterFiles, model: Any) -> Iterator[tuple[str, Any, Pair]]:
    """The layers of `model` that the files are for: name, module and pair. Raises AdapterError where one is none,
    or is no linear layer, or has other sizes.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for said, pair in files.pairs.items():
        name = _name(files, said, modules)
        module = modules[name]
        if what := _unfit(module):
            raise AdapterError(
                f"{files.folder} adapts {name}, {what}: that cannot be chosen by request", hint=WHOLE_HINT
            )
        outputs, inputs = shape_of(module)
        _check_shape(files, f"{name}, first factor", pair.down, (files.rank, inputs))
        _check_shape(files, f"{name}, second factor", pair.up, (outputs, files.rank))
        if pair.magnitude is not None:
            _check_shape(files, f"{name}, magnitudes", pair.magnitude, (outputs,))
        yield name, module, pair


def _unfit(module: Any) -> str:
    """What a module is that no row can have adapted for itself, in words, or an empty string."""
    if not isinstance(module, (Linear, QuantizedLinear)):
        kind = next(one for one in type(module).__mro__ if one.__module__.startswith("mlx"))
        return f"a layer of type {kind.__name__}"
    return "the output head" if hasattr(type(module), "selects_tokens") else ""


def _name(files: AdapterFiles, said: str, modules: Mapping[str, Any]) -> str:
    if said in modules:
        return said
    ending = [name for name in modules if name.endswith(f".{said}")]
    if files.exact or len(ending) != 1:
        raise AdapterError(f"{files.folder} adapts {said}, and the model has no such layer", hint=FOLDER_HINT)
    return ending[0]


def _check_shape(files: AdapterFiles, what: str, array: mx.array, expected: tuple[int, ...]) -> None:
    if array.shape != expected or not mx.issubdtype(array.dtype, mx.floating) or 0 in array.shape:
        raise AdapterError(
            f"{files.folder}: {what} is {array.dtype}{list(array.shape)} and must be {list(expected)}",
            hint=FOLDER_HINT,
        )


def shape_of(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, packed or not."""
    outputs, inputs = layer.weight.shape
    return outputs, inputs * 32 // layer.bits if isinstance(layer, QuantizedLinear) else inputs


def factors_of(layer: Any, pair: Pair, scale: float) -> Factors:
    """The pair as the layer's products take it, float32, unevaluated."""
    down, up = pair.down.astype(mx.float32), scale * pair.up.astype(mx.float32)
    rank = down.shape[0]
    if pair.magnitude is None:
        return Factors(down, up, rank)
    own = expanded_weight(layer) if isinstance(layer, QuantizedLinear) else layer.weight.astype(mx.float32)
    whole = own + up @ down
    ratio = pair.magnitude.astype(mx.float32) / mx.linalg.norm(whole, axis=1)
    bias = layer.get("bias")
    shift = mx.zeros_like(ratio) if bias is None else (1 - ratio) * bias.astype(mx.float32)
    return Factors(down, ratio[:, None] * up, rank, ratio, shift)
