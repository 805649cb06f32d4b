"""The prompt cache: what rows have stored, kept for those whose prompts begin alike.

Joins the tree (`prefix.py`), which decides, to the arrays of dense rows (`spans.py`). It serves rows that keep
nothing but keys and values; what cannot be cut at a block is not kept.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine.cache.kinds import LayerKind
from engine.cache.prefix import BLOCK_TOKENS, PrefixTree
from engine.cache.rows import DenseStorage, RowStorage
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


class PromptCache:
    """Serves the rows of one engine. `kinds` are the layers of rows that could share; none: nothing is kept."""

    def __init__(self, config: EngineConfig, kinds: Sequence[LayerKind]) -> None:
        cuttable = bool(kinds) and all(kind.is_attention for kind in kinds)
        self.keeps = cuttable and not config.no_prompt_cache
        self.note = _note(config, cuttable=cuttable)
        self._forgets = any(_has_window(kind) for kind in kinds)
        self._identity = (str(config.model), str(config.adapter or ""))
        self._tree = PrefixTree(int(config.prompt_cache_bytes), config.prompt_cache_ttl)
        self._layout: SpanLayout | None = None
        self._counts = _Counts()

    def held(self, row: Row) -> int:
        """How many of the row's prompt tokens could be had from here. The last one is never among them."""
        if not self._serves(row):
            return 0
        return self._tree.held(self._key(row), row.request.prompt[:-1])

    def adopt(self, row: Row, num_tokens: int, storage: RowStorage) -> None:
        """Let `row` go on with the empty `storage`, filled with its first tokens as `held` found them."""
        assert isinstance(storage, DenseStorage), "only rows of ours share"
        assert self._layout is not None, "nothing was kept yet"
        loan = self._tree.borrow(self._key(row), row.request.prompt[:num_tokens])
        try:
            assert loan.num_tokens == num_tokens, "what was found is not there any more"
            self._layout.put(loan.spans, storage)
        finally:
            self._tree.release(loan)
        row.num_cached += num_tokens - row.cursor
        row.cursor = num_tokens
        row.storage = storage

    def begun(self, row: Row) -> None:
        """Count a row that starts, and note where its prompt leaves what is kept, if it does."""
        if not self._serves(row):
            return
        self._counts.hits += row.num_cached > 0
        self._counts.misses += row.num_cached == 0
        row.cache_miss = self._tree.divergence(self._key(row), row.request.prompt)
        if row.cache_miss is not None:
            log.info(
                "request %s: prompt token %d (id %d) is the first that differs from what the prompt cache holds",
                row.request.id,
                row.cache_miss,
                row.request.prompt[row.cache_miss],
            )

    def donate(self, row: Row) -> None:
        """Keep the whole blocks of what `row` has stored, and all of it evaluated."""
        if not self._serves(row) or row.storage is None:
            return
        storage: DenseStorage = row.storage
        tokens = (*row.request.prompt, *row.output)[: storage.length]
        if len(tokens) < BLOCK_TOKENS:
            return
        layout = self._layout = self._layout or SpanLayout(storage)
        self._tree.insert(
            self._key(row),
            tokens,
            layout.num_bytes,
            lambda start, stop: layout.take(storage, start, stop),
            first=storage.first_held,
        )

    def stepped(self, row: Row) -> None:
        """Keep the block that a decoding row has filled, where its layers will have forgotten it by its end."""
        if self._forgets and row.storage is not None and row.storage.length % BLOCK_TOKENS == 0:
            self.donate(row)

    def ended(self, row: Row) -> None:
        """Count what the row did not compute, and keep prompt and answer."""
        self._counts.tokens_reused += row.num_cached
        self.donate(row)

    def reset(self) -> int:
        """Drop everything; the bytes that this freed."""
        return self._tree.clear()

    def stats(self) -> CacheStats:
        """What is kept now, and what has happened since the start."""
        self._tree.expire()
        return CacheStats(
            enabled=self.keeps,
            num_bytes=self._tree.num_bytes,
            budget_bytes=self._tree.budget_bytes,
            num_blocks=self._tree.num_blocks,
            block_tokens=BLOCK_TOKENS,
            hits=self._counts.hits,
            misses=self._counts.misses,
            tokens_reused=self._counts.tokens_reused,
            evictions=self._tree.num_evicted,
            expirations=self._tree.num_expired,
        )

    def check(self) -> None:
        """What is counted is what is there, and nothing is on loan between two steps."""
        self._tree.check()
        assert self._tree.num_borrowed == 0, "a loan outlived its adoption"

    def _serves(self, row: Row) -> bool:
        return self.keeps and row.request.cache_prompt

    def _key(self, row: Row) -> Hashable:
        return (*self._identity, row.request.cache_salt)


def _has_window(kind: LayerKind) -> bool:
    return kind.name == "window" or any(map(_has_window, kind.parts))


def _note(config: EngineConfig, *, cuttable: bool) -> str:
    if config.no_prompt_cache:
        return "prompt cache: off, as asked"
    if not cuttable:
        return "prompt cache: off, this family's layers keep what cannot be cut at a block"
    return f"prompt cache: {Size(config.prompt_cache_bytes)} in blocks of {BLOCK_TOKENS} tokens"
