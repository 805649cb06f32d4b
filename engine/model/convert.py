"""A checkpoint written again as another one: its weights packed into fewer bits, or unpacked.

The model is mlx-lm's own, its weights unread; mlx-lm says which layers can be packed and what the configuration
says of them, so that what is written loads here and there alike. Arrays are computed and written one after the
other: memory holds one of them, however large the checkpoint. The result is measured where it is built, and takes
its place only when it is as good as was asked.
"""

import contextlib
import io
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import get_total_parameters, make_shards, quantize_model, save_config

from engine.errors import ModelError, UnsupportedModel, words_of
from engine.model.conversion import DTYPES, Conversion
from engine.model.hub import SMALL_FILES
from engine.model.load import LoadedModel, load, text_config
from engine.model.memory import human_bytes
from engine.model.perplexity import Perplexity, let_go, perplexity
from engine.model.placement import packed_layers, unpacked
from engine.model.pull import Progress, ensure, entry_name, silent
from engine.model.safetensors import head
from engine.model.store import INDEX, Store, check_complete

TEXTS = ("*.md", "LICENSE*", "LICENCE*", "NOTICE*", "README*")
CODE = "*.py"
LAYERS_GROUP_SIZE = 64  # what a layer takes when its family says how it is quantized, and not this
# What describes the source's weights, and is not true of the result's.
NOT_BESIDE = ("config.json", "hf_quant_config.json", "quantize_config.json", "*.index.json")
TYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.uint16: "U16",
    mx.int16: "I16", mx.uint8: "U8", mx.int8: "I8", mx.bool_: "BOOL", mx.uint64: "U64", mx.int64: "I64",
    mx.complex64: "C64",
}  # fmt: skip


NO_GROUPS = "rows are no whole groups"
FAMILY = "the model's family wants it so"
KIND = "quantized as before, in a kind of layer that cannot be dequantized here"


@dataclass(frozen=True, slots=True)
class Left:
    """A layer that is not as was asked, and `why`: one of the texts above."""

    layer: str
    why: str


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it, at `path`, the store's entry `name` or no entry. Sizes are bytes of all files.

    `bits_per_weight` counts scales and what is not packed. `was_packed` says how the source was, or nothing. The
    perplexities are None where nobody wanted them.
    """

    path: Path
    name: str | None
    source: Path
    source_bytes: int
    size_bytes: int
    bits_per_weight: float
    dtypes: tuple[str, ...]
    num_packed: int
    left: tuple[Left, ...]
    was_packed: str
    source_perplexity: Perplexity | None
    perplexity: Perplexity | None

    @property
    def loss(self) -> float | None:
        """How many times the source's perplexity the result's is."""
        if self.perplexity is None or self.source_perplexity is None:
            return None
        return self.perplexity.value / self.source_perplexity.value


def convert(
    reference: str,
    asked: Conversion,
    *,
    name: str | None = None,
    output: Path | None = None,
    replaces: bool = False,
    store: Store | None = None,
    progress: Progress = silent,
) -> Converted:
    """Convert the checkpoint that `reference` names, fetched or imported first where it has to be.

    The result becomes the store's entry `name`, without one a name made of the source's, or the folder `output`;
    what is there already is refused, or replaced where `replaces` says so. Raises ModelError where the source
    cannot be had or packed, the disk does not take it, or the result is not as good as was asked: then nothing is
    left of it.
    """
    store = store or Store()
    entry = None
    if output is None:
        wanted = name or f"{entry_name(reference, store)}-{asked.suffix}"
        entry = store.free_name(wanted, replaces=replaces)
        folder = store.models / entry
    else:
        folder = output.expanduser().resolve()
        _refuse_taken(folder, replaces)
    source = ensure(reference, store=store, progress=progress)
    if source.resolve() == folder.resolve():
        raise ModelError(f"{reference} would take its own place", hint="give the result another name")
    planned = _planned(source, asked)
    before = _measured(source, asked, progress)
    if before is not None and not math.isfinite(before.value):
        raise ModelError(
            f"the perplexity of {source} is {before.value}: its weights are damaged",
            hint="--no-check converts it all the same",
        )
    try:
        with _begun(store, entry, folder, source=f"{reference}, {asked.said}", replaces=replaces) as staging:
            _write(source, staging, planned, progress, code=asked.trust_remote_code)
            after = _measured(staging, asked, progress)
            _judge(asked, before, after)
            size_bytes = _folder_bytes(staging)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error
    return Converted(
        path=folder,
        name=entry,
        source=source,
        source_bytes=_folder_bytes(source),
        size_bytes=size_bytes,
        bits_per_weight=8 * planned.num_bytes / planned.num_parameters,
        dtypes=planned.dtypes,
        num_packed=planned.num_packed,
        left=planned.left,
        was_packed=planned.was_packed,
        source_perplexity=before,
        perplexity=after,
    )


def _refuse_taken(folder: Path, replaces: bool) -> None:
    """Raise ModelError where `folder` is there and may not be replaced: only a checkpoint and nothing else may."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replaces:
        raise ModelError(f"{folder} is there already", hint="--force replaces a checkpoint")
    if not folder.is_dir() or not all(path.is_file() for path in folder.iterdir()):
        raise ModelError(f"{folder} holds more than a checkpoint and is not replaced")
    check_complete(folder)


@contextlib.contextmanager
def _begun(store: Store, entry: str | None, folder: Path, *, source: str, replaces: bool) -> Iterator[Path]:
    """Where the result is built. Whether its place is free is asked again under its lock."""
    if entry is None:
        with store.begin_outside(folder) as staging:
            _refuse_taken(folder, replaces)
            yield staging
    else:
        with store.locked(entry):
            store.free_name(entry, replaces=replaces)
            with store.begin(entry, source=source) as staging:
                yield staging


def _measured(path: Path, asked: Conversion, progress: Progress) -> Perplexity | None:
    if not asked.measures:
        return None
    progress("measure", 0, None)
    return perplexity(path, trust_remote_code=asked.trust_remote_code)


def _judge(asked: Conversion, before: Perplexity | None, after: Perplexity | None) -> None:
    """Raise ModelError for a result that is no success."""
    if before is None or after is None:
        return
    hint = "more bits, or smaller groups; --no-check keeps what comes"
    if not math.isfinite(after.value):
        raise ModelError(f"the result's perplexity is {after.value}; nothing was kept", hint=hint)
    loss = after.value / before.value
    if loss > asked.most_loss:
        said = f"the result's perplexity is {after.value:.4g}, {loss:.3g} times the source's {before.value:.4g}"
        raise ModelError(
            f"{said}: more than {asked.most_loss:g} times is no success, and nothing was kept",
            hint=f"more bits, or smaller groups; --max-loss {math.ceil(loss)} keeps it",
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    """The result before any of it is computed: a model over unread weights, and what will be said of it."""

    model: Any
    config: dict[str, Any]
    num_bytes: int
    num_parameters: int
    dtypes: tuple[str, ...]
    num_packed: int
    left: tuple[Left, ...]
    was_packed: str


def _planned(source: Path, asked: Conversion) -> _Planned:
    """What the checkpoint `source` becomes. Raises what loading it would, and UnsupportedModel."""
    loaded = load(source, trust_remote_code=asked.trust_remote_code, lazy=True)
    model, config = loaded.model, loaded.config
    was_packed = _unpack(source, loaded, asked)
    for said in (config, config.get("text_config")):
        if isinstance(said, dict):
            said.pop("quantization", None)
            said.pop("quantization_config", None)
    left = [Left(path, KIND) for path in _packed(model)]
    if asked.packs:
        config, others = _pack(source, model, config, asked)
        left += others
    elif left:
        raise UnsupportedModel(f"{source} cannot be dequantized: {left[0].layer} is of a kind that cannot be here")
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]
    return _Planned(
        model=model,
        config=config,
        num_bytes=sum(array.nbytes for array in arrays),
        num_parameters=get_total_parameters(model),
        dtypes=tuple(sorted({_name(array.dtype) for array in arrays if mx.issubdtype(array.dtype, mx.floating)})),
        num_packed=len(_packed(model)),
        left=tuple(left),
        was_packed=was_packed,
    )


def _write(source: Path, folder: Path, planned: _Planned, progress: Progress, *, code: bool) -> None:
    """Write what is `planned` into the empty `folder`, with what lies beside the weights of `source`.

    Raises ModelError where the disk has too little room, and OSError.
    """
    _copy_beside(source, folder, code=code)
    free_bytes = shutil.disk_usage(folder).free
    if planned.num_bytes > free_bytes:
        said = f"the weights will take {human_bytes(planned.num_bytes)}, and {human_bytes(free_bytes)} are free"
        raise ModelError(f"{said} on the disk of {folder.parent}")
    sees = "vision_tower" in getattr(planned.model, "model", {})
    save_config(planned.config, folder / "config.json", keep_vision_config=sees)
    _write_weights(planned, folder, progress)


def _unpack(source: Path, loaded: LoadedModel, asked: Conversion) -> str:
    """Unpack the model's layers and give its weights their type, nothing evaluated; returns how they were packed.

    What was packed with scales in float32, as GGUF files are, becomes bfloat16 where nobody says otherwise: a
    wider type would keep little that the packing has not lost, and float16 overflows in some families.
    """
    packed = packed_layers(loaded.model)
    ways = sorted({(layer.bits, layer.group_size, layer.mode) for layer in packed.values()})
    if asked.dtype is None and asked.mixed is None:
        if ways == [(asked.bits, asked.group_size, "affine")]:
            raise ModelError(f"{source} is quantized so already: {asked.said}", hint="mlxcel cp copies a model")
        if not asked.packs and not packed:
            raise ModelError(
                f"{source} is not quantized, and no other type is asked for", hint="--dtype names one"
            )
    loaded.model.update_modules(tree_unflatten([(name, unpacked(layer)) for name, layer in packed.items()]))
    scales = {_name(layer.scales.dtype) for layer in packed.values()}
    stated = asked.dtype or _stated_dtype(loaded.config) or min(scales, default=None)
    if asked.dtype is None and packed and stated not in ("float16", "bfloat16"):
        stated = "bfloat16"
    if stated in DTYPES:
        _cast(loaded.model, getattr(mx, stated))
        _state_dtype(loaded.config, stated)
    return " and ".join(f"{bits}-bit {mode}, groups of {size}" for bits, size, mode in ways)


def _stated_dtype(config: dict[str, Any]) -> str | None:
    """The type that a configuration says its weights have."""
    said = text_config(config)
    value = said.get("torch_dtype") or said.get("dtype")
    return value if isinstance(value, str) else None


def _state_dtype(config: dict[str, Any], dtype: str) -> None:
    """Have a configuration that says a type say this one."""
    for said in (config, config.get("text_config")):
        for key in ("torch_dtype", "dtype"):
            if isinstance(said, dict) and isinstance(said.get(key), str):
                said[key] = dtype


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Turn the floating weights of `model` to `dtype`, but for those that its family keeps as they are."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and wanted(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _pack(
    source: Path, model: Any, config: dict[str, Any], asked: Conversion
) -> tuple[dict[str, Any], list[Left]]:
    """Have mlx-lm quantize `model`, nothing evaluated: the configuration that says so, and the layers left out.

    A layer is left where its rows are no whole groups, or where its family or the recipe wants it so. Raises
    UnsupportedModel where no layer can be packed.
    """
    columns = {path: module.weight.shape[-1] for path, module in _packable(model).items()}
    sizes = dict.fromkeys(columns, asked.group_size)
    try:
        chosen = getattr(model, "quant_predicate", None)
        if asked.mixed is not None:
            chosen = mixed_quant_predicate_builder(f"mixed_{asked.mixed}", model, asked.group_size)

        def decide(path: str, module: Any) -> bool | dict[str, Any]:
            wanted = True if chosen is None else chosen(path, module)
            if isinstance(wanted, dict):
                sizes[path] = wanted.get("group_size", LAYERS_GROUP_SIZE)
            return wanted if columns[path] % sizes[path] == 0 else False

        bits = None if asked.mixed is not None else asked.bits
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm tells its figures there
            _, config = quantize_model(model, config, asked.group_size, bits, quant_predicate=decide)
    except Exception as fault:
        # A family's own code may raise anything.
        said = words_of(fault)
        raise UnsupportedModel(f"{source} cannot be quantized: {said}") from fault
    left = [Left(path, NO_GROUPS if columns[path] % sizes[path] else FAMILY) for path in _packable(model)]
    if len(left) == len(columns):
        said = f"{source} has no layer whose rows are whole groups of {asked.group_size}"
        raise UnsupportedModel(said, hint="try --group-size 32")
    return config, left


def _packable(model: Any) -> dict[str, Any]:
    """The layers of `model` that are not packed and could be, by name."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "to_quantized")}


def _packed(model: Any) -> list[str]:
    """The names of the quantized layers of `model`, of any kind."""
    return [path for path, module in model.named_modules() if "scales" in module and "weight" in module]


def _copy_beside(source: Path, folder: Path, *, code: bool) -> None:
    """Copy what is neither weights nor configuration: tokenizer, templates, defaults, texts."""
    for path in source.iterdir():
        wanted = any(path.match(pattern) for pattern in (*SMALL_FILES, *TEXTS, *((CODE,) if code else ())))
        if wanted and path.is_file() and path.name[0] != "." and not any(map(path.match, NOT_BESIDE)):
            shutil.copyfile(path, folder / path.name)


def _write_weights(planned: _Planned, folder: Path, progress: Progress) -> None:
    """Write the weights and their index as mlx-lm does, and take them out of the model meanwhile."""
    weights: dict[str, mx.array] = dict(tree_flatten(planned.model.parameters()))
    metadata = {"total_size": planned.num_bytes, "total_parameters": planned.num_parameters}
    shards: list[dict[str, mx.array]] = make_shards(weights)
    weight_map: dict[str, str] = {}
    weights.clear()
    let_go(planned.model)
    done = 0
    for number, shard in enumerate(shards, 1):
        of_several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = of_several if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        begun, _ = head((name, TYPES[array.dtype], array.shape) for name, array in shard.items())
        with open(folder / file, "wb") as out:
            out.write(begun)
            for name in list(shard):
                array = shard.pop(name)
                done += out.write(_content(array))
                progress("convert", done, planned.num_bytes)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")


def _content(array: mx.array) -> memoryview:
    """The bytes of `array`, computed now. Raises ModelError where it cannot be: its file has gone, for one."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    try:
        mx.eval(flat)
    except RuntimeError as fault:
        raise ModelError(f"the weights cannot be read: {words_of(fault)}") from fault
    return memoryview(flat)  # type: ignore[arg-type]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
