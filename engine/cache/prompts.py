"""The prompt cache: what rows have stored, kept for those whose prompts begin alike.

Joins what decides (`prefix.py`, `snapshots.py`) to the arrays of dense rows (`spans.py`, `copies.py`). Rows that
keep nothing but keys and values share blocks; others, whose states cannot be cut, are kept whole where turns
begin.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from engine.cache.copies import RowCopy
from engine.cache.kinds import LayerKind
from engine.cache.prefix import BLOCK_TOKENS, PrefixTree
from engine.cache.rows import DenseStorage, RowStorage
from engine.cache.snapshots import Kind, Snapshots
from engine.cache.spans import SpanLayout
from engine.config import EngineConfig
from engine.request import CacheStats, Row
from engine.size import Size

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    off_plan: int = 0


class PromptCache:
    """Serves the rows of one engine. `kinds` are the layers of rows that could share; none: nothing is kept."""

    def __init__(self, config: EngineConfig, kinds: Sequence[LayerKind]) -> None:
        self._cuts = all(kind.is_attention for kind in kinds)
        self.keeps = bool(kinds) and not config.no_prompt_cache
        self.note = _note(config, kinds)
        self._forgets = any(_has_window(kind) for kind in kinds)
        self._identity = (str(config.model), str(config.adapter or ""))
        budget_bytes = int(config.prompt_cache_bytes) if self.keeps else 0
        self._tree = PrefixTree(budget_bytes if self._cuts else 0, config.prompt_cache_ttl)
        self._snapshots = Snapshots(0 if self._cuts else budget_bytes, config.prompt_cache_ttl)
        self._layout: SpanLayout | None = None
        self._counts = _Counts()

    def held(self, row: Row, reproduces: Callable[[int], bool]) -> int:
        """How many of the row's prompt tokens could be had from here, at a place that `reproduces` allows.

        The last token is never among them.
        """
        if not self._serves(row):
            return 0
        tokens = row.request.prompt[:-1]
        if not self._cuts:
            return self._snapshots.longest(self._key(row), tokens, reproduces)
        held = self._tree.held(self._key(row), tokens)
        return next((n for n in range(held, 0, -BLOCK_TOKENS) if reproduces(n)), 0)

    def adopt(self, row: Row, num_tokens: int, storage: RowStorage, *, reproduces: bool = True) -> None:
        """Let `row` go on with the empty `storage`, filled with its first tokens as `held` found them.

        `reproduces` says whether the plan of a cold prompt cuts there; it does as long as `held` is what is asked.
        """
        assert isinstance(storage, DenseStorage), "only rows of ours share"
        tokens = row.request.prompt[:num_tokens]
        if self._cuts:
            self._adopt_blocks(row, tokens, storage)
        else:
            copy: RowCopy = self._snapshots.take(self._key(row), tokens, named=_is_named(row))
            copy.put(storage)
        self._counts.off_plan += not reproduces
        self._counts.tokens_reused += num_tokens - row.cursor
        row.num_cached += num_tokens - row.cursor
        row.cursor = num_tokens
        row.storage = storage

    def _adopt_blocks(self, row: Row, tokens: Sequence[int], storage: DenseStorage) -> None:
        assert self._layout is not None, "nothing was kept yet"
        loan = self._tree.borrow(self._key(row), tokens, named=_is_named(row))
        try:
            assert loan.num_tokens == len(tokens), "what was found is not there any more"
            self._layout.put(loan.spans, storage)
        finally:
            self._tree.release(loan)

    def begun(self, row: Row) -> None:
        """Count a row that starts, and note where its prompt leaves what is kept, if it does."""
        if not self._serves(row):
            return
        self._counts.hits += row.num_cached > 0
        self._counts.misses += row.num_cached == 0
        kept = self._tree if self._cuts else self._snapshots
        row.cache_miss = kept.divergence(self._key(row), row.request.prompt)
        if row.cache_miss is not None:
            log.info(
                "request %s: prompt token %d (id %d) is the first that differs from what the prompt cache holds",
                row.request.id,
                row.cache_miss,
                row.request.prompt[row.cache_miss],
            )

    def stored(self, row: Row) -> None:
        """Keep what a piece of the row's prompt has added, all of it evaluated."""
        if self._cuts:
            self._keep_blocks(row)
        elif row.cursor in row.request.boundaries[-2:]:
            self._keep_whole(row, "end" if row.prefilled else "history")

    def stepped(self, row: Row) -> None:
        """Keep the block that a decoding row has filled, where its layers will have forgotten it by its end."""
        if self._forgets and row.storage is not None and row.storage.length % BLOCK_TOKENS == 0:
            self._keep_blocks(row)

    def ended(self, row: Row) -> None:
        """Keep what is not kept yet of the row's prompt and answer."""
        if self._cuts:
            self._keep_blocks(row)
        elif not row.prefilled:
            self._keep_whole(row, "cut")

    def _keep_blocks(self, row: Row) -> None:
        storage = row.storage
        if not self._serves(row) or not isinstance(storage, DenseStorage) or storage.length < BLOCK_TOKENS:
            return
        layout = self._layout = self._layout or SpanLayout(storage)
        self._tree.insert(
            self._key(row),
            (*row.request.prompt, *row.output)[: storage.length],
            layout.num_bytes,
            lambda start, stop: layout.take(storage, start, stop),
            first=storage.first_held,
            named=_is_named(row),
        )

    def _keep_whole(self, row: Row, kind: Kind) -> None:
        storage = row.storage
        if not self._serves(row) or not isinstance(storage, DenseStorage) or not storage.length:
            return
        assert storage.length == row.cursor, "a row is kept whole before it decodes"
        self._snapshots.insert(
            self._key(row),
            row.request.prompt[: row.cursor],
            kind,
            RowCopy.bytes_of(storage),
            lambda: RowCopy(storage),
            named=_is_named(row),
        )

    def reset(self) -> int:
        """Drop everything; the bytes that this freed."""
        return self._tree.clear() + self._snapshots.clear()

    def expires_in_s(self) -> float:
        """How long until something is there to be dropped for its age; infinite where never."""
        return min(self._tree.expires_in_s(), self._snapshots.expires_in_s())

    def stats(self) -> CacheStats:
        """What is kept now, and what has happened since the start."""
        self._tree.expire()
        self._snapshots.expire()
        return CacheStats(
            enabled=self.keeps,
            num_bytes=self._tree.num_bytes + self._snapshots.num_bytes,
            budget_bytes=self._tree.budget_bytes + self._snapshots.budget_bytes,
            num_blocks=self._tree.num_blocks,
            block_tokens=BLOCK_TOKENS,
            num_snapshots=len(self._snapshots),
            hits=self._counts.hits,
            misses=self._counts.misses,
            tokens_reused=self._counts.tokens_reused,
            evictions=self._tree.num_evicted + self._snapshots.num_evicted,
            expirations=self._tree.num_expired + self._snapshots.num_expired,
            off_plan=self._counts.off_plan,
        )

    def check(self) -> None:
        """What is counted is what is there, and nothing is on loan between two steps."""
        self._tree.check()
        self._snapshots.check()
        assert self._tree.num_borrowed == 0, "a loan outlived its adoption"

    def _serves(self, row: Row) -> bool:
        return self.keeps and row.request.cache_prompt

    def _key(self, row: Row) -> Hashable:
        return (*self._identity, row.request.cache_salt)


def _is_named(row: Row) -> bool:
    return bool(row.request.prompt_cache_key)


def _has_window(kind: LayerKind) -> bool:
    return kind.name == "window" or any(map(_has_window, kind.parts))


def _note(config: EngineConfig, kinds: Sequence[LayerKind]) -> str:
    if config.no_prompt_cache:
        return "prompt cache: off, as asked"
    if not kinds:
        return "prompt cache: off, this family's rows are kept in mlx-lm's own caches"
    unit = f"blocks of {BLOCK_TOKENS} tokens" if all(kind.is_attention for kind in kinds) else "whole prompts"
    return f"prompt cache: {Size(config.prompt_cache_bytes)} in {unit}"
