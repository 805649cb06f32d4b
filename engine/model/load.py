"""A checkpoint folder into a model that is ready to run: weights evaluated, tokenizer, bounds and defaults.

Runs on the thread that owns MLX. It decides what ends an answer; it fetches nothing, and it runs no Python out of
a checkpoint unless it was told that it may. How weights lie in memory is `placement`'s to say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from engine.adapters.files import CONFIG, OURS
from engine.config import EngineConfig, setting_of
from engine.encoder.bothways import BothWays, sees_both_ways
from engine.encoder.encoder import Encoder
from engine.errors import ConfigError, ModelError, ModelIncomplete, UnsupportedModel, UntrustedCode, words_of
from engine.model.classes import classes_for
from engine.model.memory import available_bytes
from engine.model.placement import hold_room, parameter_bytes, place
from engine.model.sentence import Sentence, sentence_of
from engine.model.store import check_complete, read_json
from engine.request import Sampling
from engine.text.channels import CHANNEL, END

FALLBACK_CONTEXT_LENGTH = 4096
CONTEXT_FIELDS = (
    "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length",
    "model_max_length", "max_seq_length",
)  # fmt: skip
NEUTRAL = Sampling(temperature=1.0)
ANSWER = "mlxcel"
ADAPTER_HINT = "an adapter is a folder that `mlx_lm.lora` wrote, for this very model"
TRUST_HINT = "--trust-remote-code allows it, if you trust where the checkpoint comes from"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What one checkpoint gives. `context_length` and `vocab_size` are tokens; `sampling` is the checkpoint's own.

    `model` is an evaluated `mlx.nn.Module`, `tokenizer` is mlx-lm's TokenizerWrapper. `notes` are lines for the
    start-up log: what was decided about the weights and what had to be assumed. `sentence` says what becomes of
    hidden states where they are wanted; one that does not `continue` prompts has embeddings alone.
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
    sentence: Sentence = Sentence()
    continues: bool = True


def load(
    path: Path,
    *,
    trust_remote_code: bool = False,
    chat_template: Path | None = None,
    adapter: Path | None = None,
    compiled: bool = False,
    lazy: bool = False,
    split: Callable[[Any], None] = lambda model: None,
) -> LoadedModel:
    """Load the checkpoint folder `path`, weights evaluated. `chat_template` is a Jinja file that replaces its own.

    `adapter` is a folder with mlx-lm's LoRA or DoRA weights, which are applied to the model in memory. `compiled`
    says that the compiled kernels run here: the model's leaves are handed to them. With `lazy` the weights stay on
    the disk, as they are there: nothing is decided about them and no note says so. `split` leaves in the model,
    which is not read yet, what this process is to hold of it.

    An `auto_map` alone is no reason to refuse: mlx-lm never runs it, and most tokenizers load without it.

    Raises ModelIncomplete when files are missing, UntrustedCode when it needs its own Python and
    `trust_remote_code` is false, UnsupportedModel when mlx-lm has no such model, else ModelError with the reason.
    """
    check_complete(path)
    written = read_json(path / "config.json")
    if written.get("model_file") is not None and not trust_remote_code:
        raise UntrustedCode(f"{path} asks to run its own Python, {written['model_file']}", hint=TRUST_HINT)
    generation = generation_config(path)
    model, config, only = open_model(path, trust_remote_code)
    split(model)
    tokenizer = load_tokenizer_of(path, config, trust_remote_code)
    if chat_template is not None:
        replace_template(tokenizer, chat_template)
    notes = []
    if adapter is not None and compiled:
        hold_room(parameter_bytes(model), available_bytes())
        notes.append(_apply_adapter(model, adapter))
    if not lazy:
        notes.insert(0, place(model, compiled=compiled))
    if adapter is not None and not compiled:
        notes.append(_apply_adapter(model, adapter))
    is_encoder = isinstance(model, Encoder)
    context_length = (model.context_length if is_encoder else None) or _context_length(config)
    if context_length is None:
        notes.append(f"context: the checkpoint states no length; {FALLBACK_CONTEXT_LENGTH} tokens are assumed")
    sentence = sentence_of(path, default="mean" if is_encoder else "last")
    if sentence.refused:
        notes.append(f"embeddings: none, {sentence.refused}")
    if only:
        notes.append(f"embeddings only: {only}")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=context_length or FALLBACK_CONTEXT_LENGTH,
        vocab_size=_vocab_size(config, model, tokenizer),
        eos_token_ids=end_tokens(written, generation, tokenizer),
        sampling=sampling_of(generation),
        weight_bytes=parameter_bytes(model),
        notes=tuple(notes),
        sentence=sentence,
        continues=not only,
    )


def open_model(path: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any], str]:
    """The model, its weights not read yet, the configuration as mlx-lm completes it, and why the model gives
    embeddings alone, if it does.
    """
    written = read_json(path / "config.json")
    try:
        classes = classes_for(path, written)
        model, config = load_model(
            path,
            lazy=True,
            trust_remote_code=trust_remote_code,
            get_model_classes=classes.of,
            model_config=classes.configured,
        )
        if sees_both_ways(written) and not isinstance(model, Encoder):
            model = BothWays(model, int(text_config(config)["vocab_size"]))
    except ModelError:
        raise
    except Exception as error:
        # A checkpoint's contents can make any part of mlx-lm raise anything.
        raise _refusal(path, error) from error
    only = "the checkpoint is an encoder" if isinstance(model, Encoder) else classes.only
    return model, config, only


def load_tokenizer_of(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
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
    said = words_of(error, 500)
    if "trust_remote_code" in said:
        return UntrustedCode(f"{path} can be loaded by its own Python only", hint=TRUST_HINT)
    if "not supported" in said:
        return UnsupportedModel(f"{path} cannot be run: {said}")
    if isinstance(error, FileNotFoundError):
        return ModelIncomplete(f"{path} is not a whole checkpoint: {said}")
    if isinstance(error, KeyError):
        return ModelError(f"{path} cannot be loaded: {said} is missing in its configuration or weights")
    return ModelError(f"{path} cannot be loaded: {said}")


def replace_template(tokenizer: Any, file: Path) -> None:
    try:
        source = file.read_text(encoding="utf-8")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error):  # transformers adds tags of its own
            raise ModelError(f"the chat template {file} is wrong in line {error.lineno}: {error}") from error
    tokenizer.chat_template = source
    tokenizer.has_chat_template = True


def _apply_adapter(model: Any, folder: Path) -> str:
    """Put the adapter's layers into the model and evaluate it; return the line that says so.

    It comes after packed weights were expanded, and before leaves are handed to the compiled kernels. Low-rank
    layers over float32 weights are added into them for good, so that they cost nothing at run time. Over other
    layers they stay, because rounding would eat small changes.
    Raises ModelIncomplete for files that are missing, ModelError for an adapter of another model or kind.
    """
    for name in (CONFIG, OURS):
        if not (folder / name).is_file():
            raise ModelIncomplete(f"{folder} is no whole adapter: {name} is missing", hint=ADAPTER_HINT)
    if "lora_parameters" not in (said := read_json(folder / CONFIG)) and said.get("fine_tune_type") != "full":
        raise ModelError(f"{folder} is no adapter of mlx-lm: it has no lora_parameters", hint=ADAPTER_HINT)
    own = {name for name, module in model.named_modules() if "lora_a" in module}
    try:
        load_adapters(model, str(folder))
        given = set(mx.load(str(folder / OURS)))
    except Exception as error:
        # Its two files' contents can make any part of mlx-lm raise anything.
        reason = words_of(error, 300)
        raise ModelError(f"the adapter {folder} does not fit the model: {reason}", hint=ADAPTER_HINT) from error
    layers = {name: module for name, module in model.named_modules() if "lora_a" in module and name not in own}
    for name, module in layers.items():
        for leaf in ("lora_a", "lora_b", "m"):
            if leaf in module and f"{name}.{leaf}" not in given:
                raise ModelIncomplete(f"the adapter {folder} has no {name}.{leaf}", hint=ADAPTER_HINT)
    fused = 0
    for name, module in layers.items():
        base = module.get("linear", module.get("embedding"))
        if base is not None and base.weight.dtype == mx.float32:
            layer = module.fuse()
            mx.eval(layer.parameters())
            model.update_modules(tree_unflatten([(name, layer)]))
            fused += 1
    model.eval()
    mx.eval(model.parameters())
    how = "added into the weights" if fused == len(layers) else "beside the weights"
    return f"adapter: {folder}, {len(layers)} layers {how}" if layers else f"adapter: {folder}, whole weights"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part of a multimodal configuration, over the rest of it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _context_length(config: dict[str, Any]) -> int | None:
    text = text_config(config)
    return next((text[name] for name in CONTEXT_FIELDS if _is_count(text.get(name))), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _vocab_size(config: dict[str, Any], model: Any, tokenizer: Any) -> int:
    """Rows of the logits: as configured, else as the model's arguments default to, else the tokenizer's length."""
    arguments = getattr(model, "args", None)
    for value in (text_config(config).get("vocab_size"), getattr(arguments, "vocab_size", None)):
        if isinstance(value, int) and value > 0:
            return value
    return len(tokenizer)


def generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def end_tokens(config: dict[str, Any], generation: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, whoever names it: both configurations, the tokenizer, the chat template."""
    ids: set[int] = set()
    for value in (
        config.get("eos_token_id"),
        text_config(config).get("eos_token_id"),
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
    the turn, or markup around text, whose last does. In Harmony that may be the end of a message, of which a turn
    has several: it is none of the turn.
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
    if CHANNEL in str(tokenizer.chat_template):
        closing = [index for index in closing if tokenizer.decode([index]) != END]
    if not closing:
        return None
    only_special = all(index in special or not tokenizer.decode([index]).strip() for index in ids)
    return int(closing[0] if only_special else closing[-1])


def _is_amount(value: Any) -> bool:
    """A number that is not negative: some checkpoints say -1 for "off", which is what leaving it out says."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


SAMPLING_SETTINGS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def sampling_of(generation: dict[str, Any]) -> Sampling | None:
    """How the checkpoint asks to be sampled, or None when it does not say. What it leaves out is neutral.

    Raises ModelError for a number that would be refused as a setting.
    """
    if generation.get("do_sample") is False:
        return Sampling(temperature=0.0)
    settings = {field.name: setting_of(field) for field in fields(EngineConfig)}
    said: dict[str, Any] = {}
    for name, setting in SAMPLING_SETTINGS.items():
        value: Any = generation.get(name)
        bounds = settings[setting]
        if not _is_amount(value) or bounds is None:
            continue
        try:
            bounds.check(name, value)
        except ConfigError as error:
            raise ModelError(f"generation_config.json: {error}") from error
        said[name] = int(value) if name == "top_k" else float(value)
    if not said:
        return None
    return Sampling(**{"temperature": NEUTRAL.temperature, **said})
