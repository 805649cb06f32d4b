"""The prompt cache: what rows have stored, kept for those whose prompts begin alike.

Joins what decides (`prefix.py`, `snapshots.py`) to what rows keep: of paged rows the tree keeps the very blocks,
of dense ones copies (`spans.py`). Rows that keep nothing but keys and values share blocks; others, whose states
cannot be cut, are kept whole (`copies.py`) where turns begin.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.cache.copies import RowCopy
from engine.cache.kinds import LayerKind
from engine.cache.pages import PagedStorage, Pages
from engine.cache.prefix import BLOCK_TOKENS, UNBOUNDED_BYTES, PrefixTree, Spare
from engine.cache.rows import DenseStorage, RowStorage
from engine.cache.snapshots import Kind, Snapshots
from engine.cache.spans import SpanLayout
from engine.config import EngineConfig
from engine.request import CacheStats, Row
from engine.size import Size

log = logging.getLogger(__name__)

MIN_PART_TOKENS = 8  # of a block; to compute fewer costs less than to copy it


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    off_plan: int = 0


class PromptCache:
    """Serves the rows of one engine. `kinds` are the layers of rows that could share; none: nothing is kept.

    It takes no more than `spare` says is free at the moment, whatever its own budget: rows that live go first.
    `pages` are the pools that rows lie in, where they are paged.
    """

    def __init__(
        self,
        config: EngineConfig,
        kinds: Sequence[LayerKind],
        spare: Spare = lambda: UNBOUNDED_BYTES,
        pages: Pages | None = None,
    ) -> None:
        self._pages = pages
        self._cuts = all(kind.is_attention for kind in kinds)
        self.keeps = bool(kinds) and not config.no_prompt_cache
        self.note = _note(config, kinds)
        self._forgets = any(_has_window(kind) for kind in kinds)
        self._identity = (str(config.model), str(config.adapter or ""))
        budget_bytes = int(config.prompt_cache_bytes) if self.keeps else 0
        self._tree = PrefixTree(
            budget_bytes if self._cuts else 0,
            config.prompt_cache_ttl,
            dropped=pages.let_go if pages else lambda span: None,
            gains=pages.gains if pages else lambda span: True,
            spare=spare,
        )
        self._snapshots = Snapshots(0 if self._cuts else budget_bytes, config.prompt_cache_ttl, spare=spare)
        self._layout: SpanLayout | None = None
        self._counts = _Counts()

    @property
    def block_tokens(self) -> int:
        """Tokens of what rows share while they are stored; 0 where rows share nothing before a turn ends."""
        return BLOCK_TOKENS if self.keeps and self._cuts else 0

    @property
    def keeps_whole(self) -> bool:
        """Whether rows are kept as they are at the last two cuts of their prompts, and nowhere between."""
        return self.keeps and not self._cuts

    def held(self, row: Row, reproduces: Callable[[int], bool]) -> int:
        """How many of what the row prefills could be had from here, at a place that `reproduces` allows.

        The last token is among them only where rows are kept whole, and an equal one's end is kept.
        """
        if not self._serves(row):
            return 0
        if not self._cuts:
            return self._snapshots.longest(self._key(row), row.prefill_tokens, reproduces)
        tokens = row.prefill_tokens[:-1]
        held = self._tree.held(self._key(row), tokens, in_part=self._pages is not None)
        if held % BLOCK_TOKENS >= MIN_PART_TOKENS and reproduces(held):
            return held
        whole = held // BLOCK_TOKENS * BLOCK_TOKENS
        return next((n for n in range(whole, 0, -BLOCK_TOKENS) if reproduces(n)), 0)

    def adopt(self, row: Row, num_tokens: int, storage: RowStorage, *, reproduces: bool = True) -> None:
        """Let `row` go on with the empty `storage`, filled with its first tokens as `held` found them.

        `reproduces` says whether the plan of a cold prompt cuts there; it does as long as `held` is what is asked.
        Nothing else is counted for a row that was preempted, whose reuse is for the most part of its own, or for a
        warm-up.
        """
        self.lend(row, num_tokens, storage)
        self._counts.off_plan += not reproduces
        self.adopted(row, storage)

    def adopted(self, row: Row, storage: RowStorage) -> None:
        """Let `row` go on with `storage`, which was lent to it."""
        num_tokens = storage.length
        if row.is_counted:
            self._counts.tokens_reused += num_tokens - row.cursor
            row.num_cached += num_tokens - row.cursor
        row.cursor = num_tokens
        row.storage = storage

    def lend(self, row: Row, num_tokens: int, storage: RowStorage) -> None:
        """Fill the empty `storage` with the row's first tokens as `held` found them; the row is what it was."""
        tokens = row.prefill_tokens[:num_tokens]
        if self._cuts:
            self._adopt_blocks(row, tokens, storage)
        else:
            assert isinstance(storage, DenseStorage), "only rows of ours share"
            copy: RowCopy = self._snapshots.take(self._key(row), tokens, named=_is_named(row))
            copy.put(storage)

    def _adopt_blocks(self, row: Row, tokens: Sequence[int], storage: RowStorage) -> None:
        loan = self._tree.borrow(self._key(row), tokens, named=_is_named(row))
        try:
            assert len(loan.nodes) == -(-len(tokens) // BLOCK_TOKENS), "what was found is not there any more"
            if isinstance(storage, PagedStorage):
                storage.begin(loan.spans, len(tokens))
            else:
                assert isinstance(storage, DenseStorage), "only rows of ours share"
                assert self._layout is not None, "nothing was kept yet"
                self._layout.put(loan.spans, storage)
        finally:
            self._tree.release(loan)

    def begun(self, row: Row) -> None:
        """Count a row that runs for the first time, and note where its prompt leaves what is kept, if it does."""
        if not (self._serves(row) and row.is_counted):
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

    def reached(self, row: Row, logits: mx.array) -> None:
        """The row's last piece runs: have what the model says behind it, `[1, vocab]`, be kept with its end."""
        if self.keeps_whole and self._serves(row) and row.prefill_tokens == row.request.prompt:
            row.storage.logits = logits

    def stored(self, row: Row) -> None:
        """Keep what a piece of the row's prompt has added, all of it evaluated."""
        if self._cuts:
            self._keep_blocks(row)
        elif row.storage is not None and row.storage.logits is not None:
            self._keep_whole(row, "end")
            row.storage.logits = None
        elif row.cursor in row.request.cuts[-2:]:
            self._keep_whole(row, "history" if row.cursor < len(row.request.prompt) else "cut")

    def stepped(self, row: Row, num_tokens: int = 1) -> None:
        """Keep the block that a decoding row has filled with its last tokens, where its layers will have forgotten
        it by its end.
        """
        if self._forgets and row.storage is not None and row.storage.length % BLOCK_TOKENS < num_tokens:
            self._keep_blocks(row)

    def ended(self, row: Row) -> None:
        """Keep what is not kept yet of the row's prompt and answer."""
        if self._cuts:
            self._keep_blocks(row)
        elif not row.prefilled:
            self._keep_whole(row, "cut")

    def _keep_blocks(self, row: Row) -> None:
        storage: PagedStorage | DenseStorage | None = row.storage
        if not self._serves(row) or storage is None or storage.length < BLOCK_TOKENS:
            return
        block_bytes, take = self._taking(storage)
        self._tree.insert(
            self._key(row),
            (*row.request.prompt, *row.output)[: storage.length],
            block_bytes,
            take,
            first=storage.first_held,
            named=_is_named(row),
        )

    def _taking(self, storage: PagedStorage | DenseStorage) -> tuple[int, Callable[[int, int], list[Any]]]:
        """What one block of the row takes, and how to have some of them kept."""
        if isinstance(storage, PagedStorage):
            return sum(storage.pages.block_bytes), functools.partial(storage.pages.keep, storage)
        layout = self._layout = self._layout or SpanLayout(storage)
        return layout.num_bytes, functools.partial(layout.take, storage)

    def _keep_whole(self, row: Row, kind: Kind) -> None:
        storage = row.storage
        if not self._serves(row) or not isinstance(storage, DenseStorage) or not storage.length:
            return
        assert storage.length == row.cursor, "a row is kept whole before it decodes"
        self._snapshots.insert(
            self._key(row),
            row.prefill_tokens[: row.cursor],
            kind,
            RowCopy.bytes_of(storage),
            lambda: RowCopy(storage),
            named=_is_named(row),
        )

    @property
    def num_bytes(self) -> int:
        """What is kept now."""
        return self._tree.num_bytes + self._snapshots.num_bytes

    def evict(self, num_bytes: int) -> int:
        """Drop what is coldest until so many bytes are free, or nothing more can go; the bytes that this freed."""
        freed = self._tree.evict(num_bytes)
        return freed + self._snapshots.evict(num_bytes - freed)

    def reset(self) -> int:
        """Drop everything; the bytes that this freed."""
        freed = self._tree.clear() + self._snapshots.clear()
        if self._pages:
            self._pages.trim()
        return freed

    def expires_in_s(self) -> float:
        """How long until something is there to be dropped for its age; infinite where never."""
        return min(self._tree.expires_in_s(), self._snapshots.expires_in_s())

    def stats(self) -> CacheStats:
        """What is kept now, and what has happened since the start."""
        self._tree.expire()
        self._snapshots.expire()
        return CacheStats(
            enabled=self.keeps,
            num_bytes=self.num_bytes,
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

    def check(self, rows: Iterable[Row] | None = None) -> None:
        """What is counted is what is there, and nothing is on loan between two steps.

        Given all `rows` that are live, every block of paged ones is theirs or kept here.
        """
        self._tree.check()
        self._snapshots.check()
        assert self._tree.num_borrowed == 0, "a loan outlived its adoption"
        if self._pages and rows is not None:
            self._pages.check([row.storage for row in rows if row.storage is not None], self._tree.spans)

    def _serves(self, row: Row) -> bool:
        return self.keeps and row.request.shares

    def _key(self, row: Row) -> Hashable:
        """Whose what is kept is. A prompt with turns is cut where one without is not."""
        return (
            *self._identity,
            row.adapter,
            row.request.cache_salt,
            not self._cuts and bool(row.request.boundaries),
        )


def _is_named(row: Row) -> bool:
    return bool(row.request.prompt_cache_key)


def _has_window(kind: LayerKind) -> bool:
    return kind.name == "window" or any(map(_has_window, kind.parts))


def _note(config: EngineConfig, kinds: Sequence[LayerKind]) -> str:
    if config.no_prompt_cache:
        return "prompt cache: off, as asked"
    if not kinds:
        return "prompt cache: off, what this family's rows keep is not shared"
    unit = f"blocks of {BLOCK_TOKENS} tokens" if all(kind.is_attention for kind in kinds) else "whole prompts"
    return f"prompt cache: {Size(config.prompt_cache_bytes)} in {unit}"
