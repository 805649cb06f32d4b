"""A checkpoint folder into a model that is ready to run: weights evaluated, tokenizer, bounds and defaults.

Runs on the thread that owns MLX. It decides how weights lie in memory and what ends an answer; it fetches nothing,
and it runs no Python out of a checkpoint unless it was told that it may.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model, load_tokenizer

from engine.errors import ModelError, ModelIncomplete, UnsupportedModel, UntrustedCode
from engine.kernels import leaves
from engine.model.memory import available_bytes, human_bytes
from engine.model.store import check_complete, read_json
from engine.request import Sampling

FALLBACK_CONTEXT_LENGTH = 4096
CONTEXT_FIELDS = (
    "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length",
    "model_max_length", "max_seq_length",
)  # fmt: skip
EXPANDED_SHARE = 0.75
NEUTRAL = Sampling(temperature=1.0)
ANSWER = "mlxcel"
TRUST_HINT = "--trust-remote-code allows it, if you trust where the checkpoint comes from"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What one checkpoint gives. `context_length` and `vocab_size` are tokens; `sampling` is the checkpoint's own.

    `model` is an evaluated `mlx.nn.Module`, `tokenizer` is mlx-lm's TokenizerWrapper. `notes` are lines for the
    start-up log: what was decided about the weights and what had to be assumed.
    """

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling: Sampling | None
    weight_bytes: int
    notes: tuple[str, ...]


def load(
    path: Path, *, trust_remote_code: bool = False, chat_template: Path | None = None, compiled: bool = False
) -> LoadedModel:
    """Load the checkpoint folder `path`, weights evaluated. `chat_template` is a Jinja file that replaces its own.

    `compiled` says that the compiled kernels run here: the model's leaves are handed to them.
    An `auto_map` alone is no reason to refuse: mlx-lm never runs it, and most tokenizers load without it.

    Raises ModelIncomplete when files are missing, UntrustedCode when it needs its own Python and
    `trust_remote_code` is false, UnsupportedModel when mlx-lm has no such model, else ModelError with the reason.
    """
    check_complete(path)
    written = read_json(path / "config.json")
    if written.get("model_file") is not None and not trust_remote_code:
        raise UntrustedCode(f"{path} asks to run its own Python, {written['model_file']}", hint=TRUST_HINT)
    generation = _generation_config(path)
    model, config = _load_model(path, trust_remote_code)
    tokenizer = _load_tokenizer(path, config, trust_remote_code)
    if chat_template is not None:
        _replace_template(tokenizer, chat_template)
    notes = [_place_for_kernels(model) if compiled else _place_weights(model)]
    context_length = _context_length(config)
    if context_length is None:
        notes.append(f"context: the checkpoint states no length; {FALLBACK_CONTEXT_LENGTH} tokens are assumed")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=context_length or FALLBACK_CONTEXT_LENGTH,
        vocab_size=_vocab_size(config, model, tokenizer),
        eos_token_ids=_eos_token_ids(written, generation, tokenizer),
        sampling=_sampling(generation),
        weight_bytes=_parameter_bytes(model),
        notes=tuple(notes),
    )


def _load_model(path: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The model, its weights not read yet, and the configuration as mlx-lm completes it."""
    try:
        model, config = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        # A checkpoint's contents can make any part of mlx-lm raise anything.
        raise _refusal(path, error) from error
    return model, config


def _load_tokenizer(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    """mlx-lm's tokenizer. Saying false aloud matters: left open, transformers asks on the terminal."""
    try:
        return load_tokenizer(
            path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except Exception as error:
        # The same holds for transformers and the tokenizer's files.
        if not trust_remote_code and _brings_tokenizer_code(path):
            said = f"{path} has a tokenizer that cannot be loaded without its own Python"
            raise UntrustedCode(said, hint=TRUST_HINT) from error
        raise _refusal(path, error) from error


def _brings_tokenizer_code(path: Path) -> bool:
    file = path / "tokenizer_config.json"
    auto_map = read_json(file).get("auto_map") if file.is_file() else None
    return isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)


def _refusal(path: Path, error: Exception) -> ModelError:
    """What went wrong in mlx-lm or transformers, as one of our types."""
    said = " ".join(str(error).split())[:500] or type(error).__name__
    if "trust_remote_code" in said:
        return UntrustedCode(f"{path} can be loaded by its own Python only", hint=TRUST_HINT)
    if "not supported" in said:
        return UnsupportedModel(f"{path} cannot be run: {said}")
    if isinstance(error, FileNotFoundError):
        return ModelIncomplete(f"{path} is not a whole checkpoint: {said}")
    if isinstance(error, KeyError):
        return ModelError(f"{path} cannot be loaded: {said} is missing in its configuration or weights")
    return ModelError(f"{path} cannot be loaded: {said}")


def _replace_template(tokenizer: Any, file: Path) -> None:
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}") from error
    tokenizer.has_chat_template = True


def _place_weights(model: Any) -> str:
    """Evaluate the weights, expanded where no quantized kernel runs and they fit; return the line that says so.

    Too large an allocation on a CPU kills the process, so ModelError is raised before it is tried.
    """
    packed = _packed(model)
    slow = mx.default_device() == mx.Device(mx.cpu)
    free_bytes = available_bytes()
    if slow:
        _hold_room(_parameter_bytes(model), free_bytes)
    if not packed:
        said = _widen(model, free_bytes) if slow and _has_half_experts(model) else ""
        mx.eval(model.parameters())
        return f"weights: {_dtype_names(model)} ({human_bytes(_parameter_bytes(model))}){said}"
    bits = _bits(packed.values())
    expanded_bytes = _expanded_bytes(model, packed)
    if slow and expanded_bytes <= EXPANDED_SHARE * free_bytes:
        _expand(model, packed)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        size = human_bytes(_parameter_bytes(model))
        return f"weights: {bits}-bit, expanded to float32 ({size}): no quantized CPU kernel here"
    mx.eval(model.parameters())
    said = f"weights: {bits}-bit ({human_bytes(_parameter_bytes(model))})"
    if slow:
        said += f", slow: float32 would take {human_bytes(expanded_bytes)} of {human_bytes(free_bytes)} free"
    return said


def _place_for_kernels(model: Any) -> str:
    """Hand the model's leaves to the compiled kernels, packed and half-precision weights as they are.

    What remains is for MLX's CPU operations and turned to float32, packed experts where they fit. Raises
    ModelError where memory is too short.
    """
    bits = _bits(_packed(model).values())
    leaves.replace(model)
    rest = {name: module for name, module in model.named_modules() if not leaves.is_compiled(module)}
    packed = {name: module for name, module in rest.items() if type(module) in _UNPACKED}
    free_bytes, loaded_bytes = available_bytes(), _parameter_bytes(model)
    arrays = [array for module in rest.values() for array in _own_floats(module).values()]
    widened_bytes = sum(4 * array.size - array.nbytes for array in arrays)
    expanded_bytes = (
        loaded_bytes
        + widened_bytes
        + sum(4 * module.weight.size * 32 // module.bits for module in packed.values())
    )
    has_packed = bool(packed)
    expands = has_packed and expanded_bytes <= EXPANDED_SHARE * free_bytes
    _hold_room(loaded_bytes + widened_bytes, free_bytes)
    if expands:
        _expand(model, packed)
    for module in model.modules():
        if not leaves.is_compiled(module) and type(module) not in _UNPACKED:
            module.update({name: array.astype(mx.float32) for name, array in _own_floats(module).items()})
    mx.eval(model.parameters())
    leaves.lay_together(model)
    kind = f"{bits}-bit" if bits else _dtype_names(model)
    said = f"weights: {kind} ({human_bytes(_parameter_bytes(model))}), activations float32"
    if has_packed:
        said += ", experts expanded to float32" if expands else ", experts packed, slow: they do not fit expanded"
    return said


def _own_floats(module: Any) -> dict[str, mx.array]:
    """The parameters that are the module's own, not its parts', and not whole numbers."""
    return {
        name: value
        for name, value in module.items()
        if isinstance(value, mx.array) and not name.startswith("_") and mx.issubdtype(value.dtype, mx.floating)
    }


def _hold_room(needed_bytes: int, free_bytes: int) -> None:
    if needed_bytes > free_bytes:
        raise ModelError(
            f"the weights take {human_bytes(needed_bytes)} and {human_bytes(free_bytes)} of memory are free",
            hint="choose a smaller model, or the same one with fewer bits",
        )


def _packed(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module) in _UNPACKED}


def _bits(packed: Iterable[Any]) -> str:
    return "- and ".join(str(width) for width in sorted({module.bits for module in packed}))


def _has_half_experts(model: Any) -> bool:
    return any(type(module) is SwitchLinear and module.weight.dtype != mx.float32 for module in model.modules())


def _widen(model: Any, free_bytes: int) -> str:
    """Turn every weight to float32: MLX's CPU backend multiplies experts in no other type. Returns the note."""
    widened_bytes = _expanded_bytes(model, {})
    if widened_bytes > EXPANDED_SHARE * free_bytes:
        raise ModelError(
            f"experts run in float32 alone on a CPU, where the weights take {human_bytes(widened_bytes)} "
            f"and {human_bytes(free_bytes)} of memory are free",
            hint="choose a smaller model, or a quantized one",
        )
    model.set_dtype(mx.float32)
    return ", widened: a CPU multiplies experts in float32 alone"


def _expand(model: Any, packed: dict[str, Any]) -> None:
    """Replace every packed layer by a float32 one, evaluated alone so that its packed form is freed at once."""
    for name in list(packed):
        module = packed.pop(name)
        layer = _UNPACKED[type(module)]()
        layer.weight = _expanded_weight(module)
        if "bias" in module:
            layer.bias = module.bias
        mx.eval(layer.parameters())
        model.update_modules(tree_unflatten([(name, layer)]))
    model.eval()


def _expanded_weight(module: Any) -> mx.array:
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


_UNPACKED: dict[type, Callable[[], Any]] = {
    QuantizedLinear: lambda: Linear(1, 1, bias=False),
    QuantizedEmbedding: lambda: Embedding(1, 1),
    QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
}


def _expanded_bytes(model: Any, packed: dict[str, Any]) -> int:
    """What the weights take once everything is float32."""
    plain: int = sum(array.size for array in _arrays(model))
    for module in packed.values():
        plain += module.weight.size * 32 // module.bits - sum(array.size for array in _arrays(module))
    return 4 * plain


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _parameter_bytes(model: Any) -> int:
    return sum(array.nbytes for array in _arrays(model))


def _dtype_names(model: Any) -> str:
    names = {str(array.dtype).removeprefix("mlx.core.") for array in _arrays(model)}
    return " and ".join(sorted(names))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part of a multimodal configuration, over the rest of it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _context_length(config: dict[str, Any]) -> int | None:
    text = _text_config(config)
    return next((text[name] for name in CONTEXT_FIELDS if _is_count(text.get(name))), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _vocab_size(config: dict[str, Any], model: Any, tokenizer: Any) -> int:
    """Rows of the logits: as configured, else as the model's arguments default to, else the tokenizer's length."""
    arguments = getattr(model, "args", None)
    for value in (_text_config(config).get("vocab_size"), getattr(arguments, "vocab_size", None)):
        if isinstance(value, int) and value > 0:
            return value
    return len(tokenizer)


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, whoever names it: both configurations, the tokenizer, the chat template."""
    ids: set[int] = set()
    for value in (
        config.get("eos_token_id"),
        _text_config(config).get("eos_token_id"),
        generation.get("eos_token_id"),
        tokenizer.eos_token_id,
        list(tokenizer.eos_token_ids),
        _end_of_turn(tokenizer),
    ):
        ids.update(_ids(value))
    return frozenset(ids)


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return (item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the chat template closes an assistant's turn, or None.

    A short conversation is rendered; what follows its answer is either special tokens alone, whose first closes
    the turn, or markup around text, whose last does.
    """
    if not tokenizer.has_chat_template:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template is the checkpoint's own program and may raise anything
        return None
    before, _, tail = str(text).rpartition(ANSWER)
    if not before or not tail.strip():
        return None
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer.encode(tail.strip(), add_special_tokens=False)
    closing = [index for index in ids if index in special]
    if not closing:
        return None
    only_special = all(index in special or not tokenizer.decode([index]).strip() for index in ids)
    return int(closing[0] if only_special else closing[-1])


def _is_amount(value: Any) -> bool:
    """A number that is not negative: some checkpoints say -1 for "off", which is what leaving it out says."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _sampling(generation: dict[str, Any]) -> Sampling | None:
    """How the checkpoint asks to be sampled, or None when it does not say. What it leaves out is neutral."""
    if generation.get("do_sample") is False:
        return Sampling(temperature=0.0)
    said: dict[str, Any] = {
        name: kind(generation[name])
        for name, kind in (
            ("temperature", float),
            ("top_k", int),
            ("top_p", float),
            ("min_p", float),
            ("repetition_penalty", float),
        )
        if _is_amount(generation.get(name))
    }
    if not said:
        return None
    return Sampling(**{"temperature": NEUTRAL.temperature, **said})
