"""The tokenizer's side of a checkpoint, for whoever has its weights computed elsewhere: no weights, no arrays."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.config import EngineConfig
from engine.errors import ModelIncomplete
from engine.language import Language
from engine.model.load import end_tokens, generation_config, load_tokenizer_of, replace_template, sampling_of
from engine.model.store import read_json
from engine.request import Sampling


@dataclass(frozen=True, slots=True)
class Spoken:
    """What tokenizer and configuration of a checkpoint say. `sampling` is the checkpoint's own, if it has any."""

    tokenizer: Any
    eos_token_ids: frozenset[int]
    sampling: Sampling | None
    template_arguments: dict[str, Any]

    def language(self, vocab_size: int) -> Language:
        """That of a model with so many logits."""
        return Language.of(self.tokenizer, vocab_size, self.eos_token_ids, self.template_arguments)


def read(config: EngineConfig) -> Spoken:
    """Read a checkpoint's folder, in which no weights need be. Raises ModelError."""
    try:
        return _read(config)
    finally:
        mx.clear_streams()  # that mlx-lm made for this thread: one that outlives it aborts the process at its exit


def _read(config: EngineConfig) -> Spoken:
    path = config.model
    if not (path / "config.json").is_file():
        raise ModelIncomplete(f"{path} is no checkpoint: it has no config.json")
    written = read_json(path / "config.json")
    generation = generation_config(path)
    tokenizer = load_tokenizer_of(path, written, config.trust_remote_code)
    if config.chat_template is not None:
        replace_template(tokenizer, config.chat_template)
    ends = end_tokens(written, generation, tokenizer)
    return Spoken(tokenizer, ends, sampling_of(generation), config.template_arguments)
