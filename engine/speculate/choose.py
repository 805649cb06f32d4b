"""Who drafts for an engine, from what it was configured with."""

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.speculate.drafts import Drafts, NoDrafts, PromptLookup
from engine.speculate.governor import Costs, Governor


def drafts_of(config: EngineConfig, *, mode: str, model_type: str) -> Drafts:
    """What the scheduler is to ask. Raises ConfigError where rows cannot go back, or nobody can draft."""
    if config.drafting == "none":
        return NoDrafts()
    if config.drafting == "mtp":
        raise ConfigError("draft_kind", f"mlx-lm's {model_type} keeps no extra heads that could draft")
    if mode != "spans":
        raise ConfigError(
            "draft_kind",
            f"this model decodes in the mode {mode}: what its layers keep cannot forget tokens that were not "
            "accepted, so that none can be drafted",
        )
    costs = Costs()
    return PromptLookup(
        Governor(costs, costs), block_size=config.draft_block_size, max_rows=config.prompt_lookup_max_batch
    )
