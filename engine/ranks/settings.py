"""Which settings hold where one model runs over several ranks. No MLX."""

import dataclasses

from engine.config import EngineConfig
from engine.errors import ConfigError

OFF = "prompt cache, paged rows, drafts, lookahead and the compiled kernels, which know one process each"

# Settings that act on what is off: their neutral values, and the word for what does not cross ranks.
# fmt: off
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_model": ((None,), "drafts"),
    "draft_kind": (("auto",), "drafts"),
    "verify_cache": ((0.0,), "the prompt cache"),
    "lookahead": ((None, False), "lookahead"),
    "threads": ((0,), "the compiled kernels"),
    "decode_storage_backend": (("auto", "dense"), "paged rows"),
    "adapter": ((None,), "an adapter"),
}
# fmt: on


def over_ranks(config: EngineConfig) -> EngineConfig:
    """`config` with what cannot cross ranks off. Raises ConfigError for what was asked for and would be off."""
    assert config.ranks is not None, "one process has everything"
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    cached = {name: ((defaults[name],), "the prompt cache") for name in ("prompt_cache_bytes", "prompt_cache_ttl")}
    for name, (neutral, what) in {**NEUTRAL, **cached}.items():
        if getattr(config, name) not in neutral:
            raise ConfigError(name, f"{name} has no use over several ranks: {what} cannot cross them")
    return dataclasses.replace(
        config, no_prompt_cache=True, lookahead=False, portable=True, decode_storage_backend="dense"
    )
