"""What a checkpoint is and what it will take, said before its weights are read.

The model is built and its weights are opened as they are for loading, but nothing is evaluated: MLX knows shapes
and types without. The command line may import this module; it imports MLX, so only when it is needed.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from engine.cache import dtype
from engine.cache.sizes import Layers, is_float, layers_of, paged_row_bytes, row_bytes, token_bytes
from engine.encoder.encoder import Encoder
from engine.encoder.forward import WholeForward
from engine.kernels import native
from engine.model.budget import Transient, budget, piece_tokens, transient_of
from engine.model.load import LoadedModel, load
from engine.model.placement import Placement, placement
from engine.model.store import TOKENIZER_FILES, default_home
from engine.probe import BY_HANDLES, Verdicts
from engine.size import AUTO, Bound


@dataclass(frozen=True, slots=True)
class Packing:
    """How some weights are quantized, and how many parameters they are."""

    mode: str
    bits: int
    group_size: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What `num_slots` rows of `num_tokens` take beside the weights, against what is free. `budget_bytes` are what
    rows and prompt cache would be allowed together, None: anything.
    """

    num_slots: int
    num_tokens: int
    weight_bytes: int
    row_bytes: int
    available_bytes: int
    budget_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.num_slots * self.row_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Description:
    """One checkpoint. Sizes are bytes; `context_length` and `vocab_size` are tokens.

    `stored_bytes` are the weights as the files hold them, `weight_bytes` as they will lie in memory here;
    `expands` says that they are quantized and will be float32. `context_is_stated` is false where the checkpoint
    does not say and a length is assumed. `tokenizer` is the name of its file, `end_tokens` are the ids and texts
    that end an answer. `decode_mode` is what an earlier probe found, or None; `pageable` says that rows can share
    blocks. `transient` is what a prefill forward takes on its way. One that does not `continue` prompts gives
    embeddings alone.
    """

    path: Path
    architecture: str
    model_type: str
    num_parameters: int
    file_bytes: int
    stored_bytes: int
    weight_bytes: int
    expands: bool
    packings: tuple[Packing, ...]
    dtypes: tuple[str, ...]
    layers: tuple[Layers, ...]
    context_length: int
    context_is_stated: bool
    vocab_size: int
    tokenizer: str
    has_chat_template: bool
    end_tokens: tuple[tuple[int, str], ...]
    decode_mode: str | None
    pageable: bool
    available_bytes: int
    transient: Transient
    continues: bool = True

    @property
    def token_bytes(self) -> int:
        """What each further token of a long row keeps: windows are full by then."""
        return token_bytes(self.layers)

    @property
    def bounded_bytes(self) -> int:
        """What a long row keeps however long it is: full windows, and states."""
        states = sum(group.count * group.fixed_bytes for group in self.layers)
        return states + sum(group.count * group.token_bytes * group.window for group in self.layers)

    def fit(
        self,
        num_slots: int,
        num_tokens: int,
        *,
        asked: Bound = AUTO,
        chunk_tokens: int = 0,
        paged: bool = False,
    ) -> Fit:
        """`num_slots` rows of `num_tokens` each, in blocks or in buffers of their own.

        `asked` and `chunk_tokens` are the settings of budget and prefill pieces.
        """
        longest = piece_tokens(chunk_tokens, on_grid=self.decode_mode not in (None, "spans"))
        given = budget(
            asked,
            max(self.available_bytes - self.weight_bytes, 0),
            self.transient,
            piece_tokens=longest,
            context_tokens=num_tokens,
            num_rows=num_slots,
        )
        taken = (paged_row_bytes if paged else row_bytes)(self.layers, num_tokens, longest)
        return Fit(num_slots, num_tokens, self.weight_bytes, taken, self.available_bytes, given.cache_bytes)

    def largest_context(self, num_slots: int, *, paged: bool = False) -> int:
        """The longest context, up to the model's own, that `num_slots` rows may fill; 0 where none fits."""
        fitting, too_long = 0, self.context_length + 1
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            if self.fit(num_slots, middle, paged=paged).fits:
                fitting = middle
            else:
                too_long = middle
        return fitting


def describe(
    path: Path,
    *,
    trust_remote_code: bool = False,
    kernels: native.Native | str | None = None,
    cache_dtype: str = "auto",
) -> Description:
    """Describe the checkpoint folder `path`; nothing is read but its headers and its small files.

    `kernels` are those that would run it, as `native.start` gave them; None: find out. `cache_dtype` is the
    setting. What it comes to depends on the mode: before a first probe, rows are said to keep the model's types.

    Raises what loading it would, and UnsupportedModel when no forward can be built.
    """
    loaded = load(path, trust_remote_code=trust_remote_code, lazy=True)
    kernels = native.start() if kernels is None else kernels
    compiled = isinstance(kernels, native.Native)
    place = placement(loaded.model, compiled=compiled)
    packings, dtypes = _packings(place), _dtypes(loaded.model)
    mode = WholeForward.name if isinstance(loaded.model, Encoder) else _decode_mode(path, native.said(kernels))
    kept_as = (
        None
        if mode in (None, "alone", WholeForward.name)
        else dtype.chosen(cache_dtype, compiled=compiled and mode in BY_HANDLES)
    )
    layers = layers_of(_hollow(loaded.model, widened=place.in_float32), kept_as)
    transient = transient_of(
        loaded.model,
        loaded.config,
        vocab_size=loaded.vocab_size,
        mode=mode,
        compiled=compiled,
    )
    named = loaded.config.get("architectures")
    return Description(
        path=path,
        architecture=str(named[0]) if isinstance(named, list) and named else type(loaded.model).__name__,
        model_type=str(loaded.config.get("model_type", "")),
        num_parameters=place.num_parameters,
        file_bytes=sum(file.stat().st_size for file in path.glob("model*.safetensors")),
        stored_bytes=place.stored_bytes,
        weight_bytes=place.num_bytes,
        expands=place.expands,
        packings=packings,
        dtypes=dtypes,
        layers=layers,
        context_length=loaded.context_length,
        context_is_stated=not any(note.startswith("context:") for note in loaded.notes),
        vocab_size=loaded.vocab_size,
        tokenizer=next((name for name in TOKENIZER_FILES if (path / name).is_file()), "tiktoken"),
        has_chat_template=bool(loaded.tokenizer.has_chat_template),
        end_tokens=tuple((index, _text(loaded, index)) for index in sorted(loaded.eos_token_ids)),
        decode_mode=mode,
        pageable=compiled and mode == "spans",
        available_bytes=place.free_bytes,
        transient=transient,
        continues=loaded.continues,
    )


def _hollow(model: Any, *, widened: bool) -> Any:
    """`model` with every weight replaced by one zero, seen in its shape: should a forward look at a value, then no
    weights are read. `widened` turns floating types to float32, as expanding does."""

    def zeros(array: mx.array) -> mx.array:
        to_float32 = widened and is_float(array)
        return mx.broadcast_to(mx.zeros((), mx.float32 if to_float32 else array.dtype), array.shape)

    model.update(tree_map(zeros, model.parameters()))
    return model


def _packings(place: Placement) -> tuple[Packing, ...]:
    counted: Counter[tuple[str, int, int]] = Counter()
    for module in place.packed.values():
        key = (str(module.mode), int(module.bits), int(module.group_size))
        counted[key] += module.weight.size * 32 // module.bits
    return tuple(Packing(*key, count) for key, count in counted.most_common())


def _dtypes(model: Any) -> tuple[str, ...]:
    """The types of the weights, the one that most bytes have first."""
    counted: Counter[str] = Counter()
    leaves: Any = tree_flatten(model.parameters())
    for _, array in leaves:
        counted[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    return tuple(name for name, _ in counted.most_common())


def _text(loaded: LoadedModel, index: int) -> str:
    try:
        return str(loaded.tokenizer.decode([index], skip_special_tokens=False))
    except Exception:  # noqa: BLE001 - an id beyond the tokenizer's own; tokenizers raise anything
        return ""


def _decode_mode(path: Path, kernels: str) -> str | None:
    """The mode that an earlier probe of the checkpoint at `path` found with these kernels."""
    verdict = Verdicts(default_home() / "probes").find(path, kernels)
    return None if verdict is None else verdict.mode
