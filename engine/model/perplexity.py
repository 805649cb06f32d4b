"""How well a checkpoint foretells a text that is shipped with it: its perplexity, by the engine's own forward.

One number for one text says little of a model, and much of two forms of the same one. The text was written for
this purpose, so that no model has learned it by heart. Weights are read while the forward runs and let go behind
it, so that a model larger than the memory can be measured.
"""

import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from engine.cache.adapter import select_before_head
from engine.errors import ModelError, words_of
from engine.forward import AloneForward, Span
from engine.kernels import native, portable
from engine.model.load import LoadedModel, load
from engine.model.placement import place_unread
from engine.model.store import default_home

TEXT = Path(__file__).with_name("perplexity.txt")
MOST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Perplexity:
    """e to the mean loss of `num_tokens` tokens, each foretold from those before it. It may be infinite or NaN."""

    value: float
    num_tokens: int


def perplexity(path: Path, *, trust_remote_code: bool = False) -> Perplexity:
    """The perplexity of the checkpoint folder `path` on the text. Nothing of it is left in memory.

    Raises what loading it would, and ModelError for a model that cannot be run or has no tokens for the text.
    """
    portable.prepare(default_home() / "kernels")
    compiled = isinstance(native.start(), native.Native)
    try:
        loaded = load(path, trust_remote_code=trust_remote_code, lazy=True)
        place_unread(loaded.model, compiled=compiled)
        return _measured(loaded)
    finally:
        gc.collect()  # a model's modules and the classes made for them refer to each other


def let_go(model: Any) -> None:
    """Have `model` hold no weights any more: what was built over them frees each behind its last use."""
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))


def _measured(loaded: LoadedModel) -> Perplexity:
    ids: list[int] = loaded.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    ids = ids[: min(MOST_TOKENS, loaded.context_length)]
    if len(ids) < 2 or max(ids) >= loaded.vocab_size:
        raise ModelError("the tokenizer is another model's: its tokens of an English text have no embeddings")
    try:
        loss = _loss(loaded, ids)
        let_go(loaded.model)
        mean = float(loss.item())  # type: ignore[arg-type]
    except Exception as fault:
        # A model's own code may raise anything.
        said = words_of(fault)
        raise ModelError(f"the model cannot be run here: {said}") from fault
    return Perplexity(math.exp(mean) if not mean > 700 else math.inf, len(ids) - 1)


def _loss(loaded: LoadedModel, ids: list[int]) -> mx.array:
    """The mean of what each token but the first costs, in nats: not evaluated yet."""
    forward = AloneForward(loaded.model, select_before_head(loaded.model, loaded.vocab_size))
    logits = forward.run([Span(forward.open(), ids[:-1], num_sampled=len(ids) - 1)]).astype(mx.float32)
    wanted = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - wanted).mean()
