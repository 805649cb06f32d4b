"""What the start-up log says of how a model runs, a line for each decision."""

from engine.cache import dtype
from engine.config import EngineConfig
from engine.forward import Forward


def cache_note(forward: Forward) -> str:
    if not forward.stores:
        return "cache: what the model keeps, in its own types"
    kept = "in the model's type" if forward.cache_dtype is None else f"as {dtype.name_of(forward.cache_dtype)}"
    return f"cache: keys and values {kept}"


def context_note(context_length: int, num_slots: int, shared: int | None) -> str:
    together = "" if shared is None else f", {shared} for all that run at once"
    return f"context: {context_length} tokens, slots: {num_slots}{together}"


def mixing_notes(config: EngineConfig, forward: Forward) -> list[str]:
    if config.mixed_step and forward.on_grid:
        return [
            "mixed steps: none, this family's prompts are cut at fixed places and take turns with decode steps"
        ]
    return []
