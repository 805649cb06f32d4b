"""A smaller model that drafts: it follows each row with storage of its own and says how the row may go on.

It draws as the row draws, with the row's own noise and settings on its own logits, so that it is right about drawn
answers too as often as the two models agree. Runs on the engine's thread. Whether a draft is asked for is not
decided here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.cache import adapter, dtype
from engine.cache.rows import DenseStorage
from engine.config import MAX_DRAFT_BLOCK
from engine.errors import ConfigError
from engine.forward import Forward, Span
from engine.kernels import functions
from engine.model.load import LoadedModel, load
from engine.model.store import default_home
from engine.probe import Verdicts, forward_by
from engine.request import Row
from engine.sample.state import Draw, draw_of

CATCH_UP_TOKENS = 128  # of a row's text that one step lets it read; until it has read all, it drafts nothing

Sample = Callable[[mx.array, Sequence[Draw]], mx.array]


class DraftModel:
    """Drafts with the model that `drafter` has loaded. `vocab_size` is the target's. Where the two differ, as they
    do by padding, no token is drafted that the target lacks, and nothing for a row with one that the drafter
    lacks.
    """

    def __init__(self, drafter: "Drafter", vocab_size: int, sample: Sample) -> None:
        self._forward = drafter.forward
        self._known_tokens = drafter.loaded.vocab_size
        self._vocab_size = vocab_size
        self._sample = sample
        self._rows: dict[Row, _Followed] = {}

    def propose(self, wanted: Sequence[tuple[Row, int]]) -> dict[Row, tuple[int, ...]]:
        """Drafts of up to so many tokens for these rows, one forward for all rows' next tokens at a time.

        A row of which more has come than a step may read gets none yet.
        """
        drafts: dict[Row, list[int]] = {}
        logits = self._caught_up([row for row, _ in wanted])
        left = dict(wanted)
        while logits:
            rows = list(logits)
            draws = [draw_of(row, drafted=drafts.get(row, ())) for row in rows]
            together = self._fitted(mx.concatenate(list(logits.values())))
            tokens: list[int] = self._sample(together, draws).tolist()  # type: ignore[assignment]
            for row, token in zip(rows, tokens, strict=True):
                drafts.setdefault(row, []).append(token)
            logits = self._advance({row: [drafts[row][-1]] for row in rows if len(drafts[row]) < left[row]})
        return {row: tuple(tokens) for row, tokens in drafts.items()}

    def forget(self, row: Row) -> None:
        """Let go of what was stored for the row; unknown rows are no error."""
        self._rows.pop(row, None)

    def num_bytes(self) -> int:
        """What is stored for all rows."""
        return sum(a.nbytes for followed in self._rows.values() for a in followed.storage.arrays())

    def _caught_up(self, rows: Sequence[Row]) -> dict[Row, mx.array]:
        """Logits `[1, vocab]` behind all that has come of the rows; of those that have read it."""
        reads = {row: self._followed(row).unread(row) for row in rows}
        reads = {row: tokens for row, tokens in reads.items() if max(tokens) < self._known_tokens}
        logits = self._advance(reads)
        return {row: own for row, own in logits.items() if self._rows[row].has_read(row)}

    def _followed(self, row: Row) -> "_Followed":
        if row not in self._rows:
            forward = self._forward
            storage = DenseStorage(forward.kinds, forward.cache_dtype, spare_tokens=MAX_DRAFT_BLOCK)
            self._rows[row] = _Followed(storage)
        return self._rows[row]

    def _advance(self, tokens: dict[Row, list[int]]) -> dict[Row, mx.array]:
        """Store the tokens of each row; logits `[1, vocab]` behind each."""
        if not tokens:
            return {}
        spans = [Span(self._rows[row].storage, read, num_sampled=1) for row, read in tokens.items()]
        logits = self._forward.run(spans)
        mx.eval(logits, *(array for span in spans for array in span.storage.arrays()))
        for row, read in tokens.items():
            self._rows[row].tokens += read
        return {row: logits[i : i + 1] for i, row in enumerate(tokens)}

    def _fitted(self, logits: mx.array) -> mx.array:
        """As wide as the target's: its noise is indexed by token."""
        missing = self._vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return mx.concatenate([logits, mx.full((logits.shape[0], missing), -mx.inf, logits.dtype)], axis=-1)


class _Followed:
    """One row as the draft model has read it: `tokens` are stored, and the first `num_sure` of them have come."""

    __slots__ = ("num_sure", "storage", "tokens")

    def __init__(self, storage: DenseStorage) -> None:
        self.storage = storage
        self.tokens: list[int] = []
        self.num_sure = 0

    def unread(self, row: Row) -> list[int]:
        """What has come and is not stored, the row's last token always, but no more than one step may read;
        what is stored and has not come is forgotten.
        """
        prompt, output = row.request.prompt, row.output
        num_came = len(prompt) + len(output)

        def came(place: int) -> int:
            return prompt[place] if place < len(prompt) else output[place - len(prompt)]

        last = min(len(self.tokens), num_came - 1)
        while self.num_sure < last and self.tokens[self.num_sure] == came(self.num_sure):
            self.num_sure += 1
        if self.num_sure < len(self.tokens):
            self.storage.rewind(len(self.tokens) - self.num_sure)
            del self.tokens[self.num_sure :]
        return [came(at) for at in range(self.num_sure, min(num_came, self.num_sure + CATCH_UP_TOKENS))]

    def has_read(self, row: Row) -> bool:
        return len(self.tokens) == len(row.request.prompt) + len(row.output)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A loaded draft model, and the forward that runs it."""

    loaded: LoadedModel
    forward: Forward

    @classmethod
    def open(cls, path: Path, *, compiled: bool, kernels: str) -> "Drafter":
        """Load the checkpoint at `path`. Raises ModelError, and ConfigError for one that cannot draft."""
        adapter.install_attention()
        loaded = load(path, compiled=compiled)
        verdicts = Verdicts(default_home() / "probes")
        known = verdicts.find(path, kernels)
        forward, verdict = forward_by(known, loaded.model, loaded.vocab_size)
        if known is None:
            verdicts.keep(path, kernels, verdict)
        uses = functions.are_used_by(loaded.model) and forward.by_handles
        forward.cache_dtype = dtype.chosen("auto", compiled=uses)
        return cls(loaded, forward)


def check_pair(tokenizer: Any, drafter: Drafter) -> None:
    """Raise ConfigError where `drafter` cannot draft for a model with this tokenizer."""
    own, other = tokenizer.get_vocab(), drafter.loaded.tokenizer.get_vocab()
    differing = min(set(own.items()) ^ set(other.items()), key=lambda item: item[1], default=None)
    if differing is not None:
        raise ConfigError(
            "draft_model",
            f"the draft model has another tokenizer: {differing[0]!r} is token {differing[1]} in one alone",
            hint="a draft model is a smaller one of the same family",
        )
    if not drafter.loaded.continues:
        raise ConfigError("draft_model", "the draft model gives embeddings and continues nothing")
    if drafter.forward.name != "spans":
        raise ConfigError(
            "draft_model",
            f"the draft model decodes in the mode {drafter.forward.name}: what its layers keep cannot forget "
            "tokens that were not accepted",
        )
