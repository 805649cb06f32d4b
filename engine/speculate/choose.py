"""What an engine speculates with, from its configuration: who decides, and the model that drafts, if one does."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cache.sizes import layers_of, row_bytes
from engine.config import DRAFT_BLOCK, LOOKUP_ROWS, EngineConfig
from engine.errors import ConfigError
from engine.model.load import LoadedModel
from engine.plan import Tick
from engine.remembered import Remembered, fingerprint
from engine.request import Row
from engine.speculate.drafter import CATCH_UP_TOKENS, Drafter, DraftModel, Sample, check_pair
from engine.speculate.drafts import Drafts, ModelDrafts, NoDrafts, PromptLookup
from engine.speculate.governor import FIRST_GUESS, Governor
from engine.speculate.lookup import KINDS
from engine.speculate.policy import Pair, kept, remembered

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafts` is what the scheduler asks; `row_bytes` what a row of so many tokens takes beside its storage."""

    drafts: Drafts
    note: str = ""
    model: DraftModel | None = None
    row_bytes: Callable[[int], int] = lambda num_tokens: 0

    def tokens(self, tick: Tick) -> dict[Row, tuple[int, ...]]:
        """What the rows of `tick` bring beside their last tokens. A fault of the draft model fails no row."""
        live = [draft for draft in tick.drafts if draft.row.finish_reason is None]
        known = {draft.row: draft.tokens for draft in live if draft.tokens}
        asked = [draft for draft in live if not draft.tokens]
        if self.model is None or not asked:
            return known
        try:
            said = self.model.propose([(draft.row, draft.num_tokens) for draft in asked])
        except Exception:
            log.exception("the draft model failed; its rows take one token a step")
            said = {}
            for draft in asked:
                self.model.forget(draft.row)
        for draft in asked:
            tokens = said.get(draft.row, ())
            if draft.verified:
                draft.row.num_drafted = len(tokens)
                known[draft.row] = tokens
            else:
                draft.row.looked_at = tokens
        return known

    def forget(self, row: Row) -> None:
        """The row holds nothing any more."""
        if self.model is not None:
            self.model.forget(row)


def speculation_of(
    config: EngineConfig,
    loaded: LoadedModel,
    drafter: Drafter | None,
    *,
    mode: str,
    kernels: str,
    memory: Remembered,
    sample: Sample,
) -> Speculation:
    """What `loaded`, which decodes in `mode`, is to speculate with; what was found out before is in `memory`.

    Raises ConfigError where rows cannot go back, nobody can draft, or the two models do not go together.
    """
    kind = config.drafting
    if kind == "none":
        return Speculation(NoDrafts())
    if kind == "mtp":
        model_type = loaded.config.get("model_type", "model class")
        raise ConfigError(
            "draft_kind",
            f"mlx-lm's {model_type} keeps no extra heads that could draft",
            hint="draft_kind prompt-lookup needs none",
        )
    if mode != "spans":
        raise ConfigError(
            "draft_kind",
            f"this model decodes in the mode {mode}: what its layers keep cannot forget tokens that were not "
            "accepted, so that none can be drafted",
        )
    files = [config.model] if config.draft_model is None else [config.model, config.draft_model]
    most = config.draft_block_size or DRAFT_BLOCK
    guesses = [guess for _, guess in KINDS] if kind == "prompt-lookup" else [FIRST_GUESS]
    governor, keep = _remembered(files, (kind, kernels), memory, guesses)
    if drafter is not None:
        governor.draft_cost = drafter.loaded.weight_bytes / max(loaded.weight_bytes, 1)
    pair = Pair(config.model.name, files[-1].name if drafter else kind, kernels)
    if kind == "prompt-lookup":
        max_rows = config.prompt_lookup_max_batch or LOOKUP_ROWS
        lookup = PromptLookup(governor, block_size=most, max_rows=max_rows, pair=pair, keep=keep)
        return Speculation(
            lookup, f"drafts: prompt lookup, up to {most} tokens, with at most {max_rows} requests at once"
        )
    assert drafter is not None, "a draft model is loaded where one drafts"
    check_pair(loaded.tokenizer, drafter)
    layers = layers_of(drafter.loaded.model, drafter.forward.cache_dtype)
    return Speculation(
        ModelDrafts(governor, block_size=most, pair=pair, keep=keep),
        f"drafts: {pair.drafter}, up to {most} tokens",
        DraftModel(drafter, loaded.vocab_size, sample),
        lambda num_tokens: row_bytes(layers, num_tokens, CATCH_UP_TOKENS),
    )


def _remembered(
    files: Sequence[Path], said: tuple[str, ...], memory: Remembered, guesses: Sequence[float]
) -> tuple[Governor, Callable[[Governor], None]]:
    """The governor of these checkpoints, and what keeps it for the next run; nothing where they have no files."""
    name = None
    with contextlib.suppress(OSError):
        name = fingerprint(*files, said=said)
    if name is None:
        return remembered(lambda: None, guesses), lambda governor: None
    return remembered(lambda: memory.read(name), guesses), lambda governor: memory.keep(name, kept(governor))
