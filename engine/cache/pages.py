"""Paged storage: the pools of all layers, and rows whose tables name blocks of them (`blocks.py` counts those).

Layers that see equally far are a group: a block's number stands for one block in the pool of each of its layers,
so a row has one table for a group. A pool is written in place, by the compiled attention or by slices; pools grow
by slabs, and no byte moves when a row joins, leaves or shares.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.cache.blocks import Blocks, BlockTable
from engine.cache.dtype import rounded
from engine.cache.kinds import LayerKind, leaf_kinds
from engine.cache.prefix import BLOCK_TOKENS
from engine.cache.rows import leaves_of, new_layer

Block = tuple[int, ...]  # the number in each group


class Pool:
    """Keys and values of one layer, of all rows: `[1, heads, blocks of 16, head_dim]`.

    They are stored as `dtype`, or, with None, as what they are. Heads come first, so that a head's keys in blocks
    that follow each other lie together.
    """

    __slots__ = ("_dtype", "keys", "values")

    def __init__(self, dtype: mx.Dtype | None) -> None:
        self._dtype = dtype
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def grow(self, num_blocks: int, keys: mx.array, values: mx.array) -> bool:
        """Have room for `num_blocks`; whether there was too little.

        `keys` and `values` show how many heads there are, of what size and type.
        """
        held = 0 if self.keys is None else self.keys.shape[2] // BLOCK_TOKENS
        if held >= num_blocks:
            return False
        self.keys = self._grown(self.keys, keys, num_blocks - held)
        self.values = self._grown(self.values, values, num_blocks - held)
        return True

    def _grown(self, pool: mx.array | None, like: mx.array, num_blocks: int) -> mx.array:
        shape = (1, like.shape[1], num_blocks * BLOCK_TOKENS, like.shape[3])
        slab = mx.zeros(shape, self._dtype or like.dtype)
        return slab if pool is None else mx.concatenate([pool, slab], axis=2)

    def arrays(self) -> tuple[mx.array, mx.array]:
        assert self.keys is not None, "nothing is stored yet"
        assert self.values is not None
        return self.keys, self.values

    def copy(self, source: int, target: int) -> None:
        """Let the block `target` hold what `source` holds.

        Written where it lies: MLX would copy the whole pool, since it reads what it writes to.
        """
        for pool in self.arrays():
            within = in_place(pool)
            within[:, :, _places(target)] = within[:, :, _places(source)]

    def shrink(self, num_blocks: int) -> None:
        """Give back what is behind the first `num_blocks`."""
        if self.keys is None or self.values is None or self.keys.shape[2] == num_blocks * BLOCK_TOKENS:
            return
        self.keys, self.values = (_first(pool, num_blocks) for pool in (self.keys, self.values))


class PagedLayer:
    """Keys and values of one layer of one row, found by the table of the layer's group."""

    __slots__ = ("group", "length", "pages", "pool", "table", "window")

    def __init__(self, pages: "Pages", number: int, table: BlockTable) -> None:
        self.pages = pages
        self.group = pages.group_of[number]
        self.pool = pages.pools[number]
        self.window = pages.windows[self.group]
        self.table = table
        self.length = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Store the next tokens' keys and values, `[1, heads, n, head_dim]`."""
        count = keys.shape[2]
        self.room(keys, values)
        places = self._places(self.length, self.length + count)
        for pool, new in zip(self.pool.arrays(), (keys, values), strict=True):
            pool[:, :, places] = rounded(new, pool.dtype)
        self.pages.written += self.pool.arrays()
        self.length += count

    def room(self, keys: mx.array, values: mx.array) -> None:
        """Let the pool have every block that the tables name."""
        self.pool.grow(len(self.pages.blocks[self.group]), keys, values)

    def wrote(self, num_tokens: int) -> None:
        """The next tokens are in the pool already."""
        self.length += num_tokens

    def put(self, first: int, keys: mx.array, values: mx.array) -> None:
        """Let the positions from `first` on hold these keys and values, `[1, heads, n, head_dim]` of the pool's
        type. Written where they belong: MLX scatters by index at a thirtieth of the speed.
        """
        self.room(keys, values)
        self.length = first + keys.shape[2]
        for pool, new in zip(self.pool.arrays(), (keys, values), strict=True):
            within, given, at = in_place(pool), in_place(new), 0
            for start, stop in self.runs(first):
                within[:, :, start:stop] = given[:, :, at : at + stop - start]
                at += stop - start

    def runs(self, first: int) -> list[tuple[int, int]]:
        """Where in the pool the positions from `first` to the last stored are, those together that follow each
        other there.
        """
        runs: list[tuple[int, int]] = []
        at = first
        while at < self.length:
            block, within = divmod(at - self.table.base, BLOCK_TOKENS)
            count = min(BLOCK_TOKENS - within, self.length - at)
            start = self.table.numbers[block] * BLOCK_TOKENS + within
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], start + count
            else:
                runs.append((start, start + count))
            at += count
        return runs

    def view(self, first_position: int) -> tuple[mx.array, mx.array]:
        """Keys and values from `first_position` to the last stored, laid together."""
        places = self._places(first_position, self.length)
        keys, values = self.pool.arrays()
        return keys[:, :, places], values[:, :, places]

    def _places(self, start: int, stop: int) -> mx.array:
        """Where in the pool the positions `start` to `stop` are."""
        base, numbers = self.table.base, self.table.numbers
        within = ((position - base, position % BLOCK_TOKENS) for position in range(start, stop))
        return mx.array([numbers[at // BLOCK_TOKENS] * BLOCK_TOKENS + rest for at, rest in within], mx.int32)


class PagedStorage:
    """A row's state over all layers, in blocks of the pools of `pages`."""

    __slots__ = ("_leaves", "_whole_from", "layers", "length", "pages", "tables")

    def __init__(self, pages: "Pages", kinds: Sequence[LayerKind]) -> None:
        self.pages = pages
        self.tables = [BlockTable(blocks) for blocks in pages.blocks]
        numbers = iter(range(len(pages.pools)))

        def attention(kind: LayerKind) -> PagedLayer:
            number = next(numbers)
            return PagedLayer(pages, number, self.tables[pages.group_of[number]])

        self.layers = [new_layer(kind, attention) for kind in kinds]
        self._leaves: list[PagedLayer] = leaves_of(self.layers)
        self.length = 0
        self._whole_from = 0  # the first position from which on no block begins with what was never stored

    def arrays(self) -> list[mx.array]:
        """What the last forward has written, of this row and of others."""
        return self.pages.unevaluated()

    def attention_layers(self) -> list[PagedLayer]:
        return self._leaves

    def reserve(self, num_tokens: int) -> None:
        """Let the next tokens have blocks of their own, and let go of those that no later token sees."""
        for window, table in zip(self.pages.windows, self.tables, strict=True):
            if window:
                table.forget(self.length + 1 - window)
        copies = [table.reserve(self.length, self.length + num_tokens) for table in self.tables]
        self.pages.copy(copies)

    def rewind(self, num_tokens: int) -> None:
        """Forget the last tokens, of those that the last forward has stored and not all of them.

        The blocks stay: the next tokens come into them.
        """
        self.length -= num_tokens
        for layer in self._leaves:
            layer.length -= num_tokens

    def begin(self, blocks: Sequence[Block], num_tokens: int) -> None:
        """Begin an empty row with these blocks, which hold its first `num_tokens` and stay what they are."""
        assert self.length == 0, "a row that has begun goes on by itself"
        for group, (window, table) in enumerate(zip(self.pages.windows, self.tables, strict=True)):
            first = max(0, num_tokens + 1 - window) // BLOCK_TOKENS if window else 0
            table.begin([block[group] for block in blocks[first:]], first * BLOCK_TOKENS)
        self.length = num_tokens
        for layer in self._leaves:
            layer.length = num_tokens

    def begin_at(self, first: Sequence[int], num_tokens: int) -> None:
        """Let an empty row have blocks for `num_tokens`, of each group from the position `first` on, all of which
        are to be stored now.
        """
        for table, position in zip(self.tables, first, strict=True):
            table.begin([], position // BLOCK_TOKENS * BLOCK_TOKENS)
            table.reserve(table.base, num_tokens)
        self._whole_from = -(-max(first) // BLOCK_TOKENS) * BLOCK_TOKENS
        self.length = num_tokens

    @property
    def first_held(self) -> int:
        """The first position that every layer still holds."""
        return max(self._whole_from, *(table.base for table in self.tables))

    def free(self) -> None:
        """Let go of everything; the row is not to be used again."""
        for table in self.tables:
            table.clear()


class Pages:
    """The pools of one engine's rows. `kinds` are what a row's entries keep: keys and values alone."""

    def __init__(self, kinds: Sequence[LayerKind], dtype: mx.Dtype | None) -> None:
        self._kinds = kinds
        leaves = list(leaf_kinds(kinds))
        self.windows = sorted({leaf.window for leaf in leaves})
        self.group_of = [self.windows.index(leaf.window) for leaf in leaves]
        self.blocks = [Blocks() for _ in self.windows]
        self.pools = [Pool(dtype) for _ in leaves]
        self.block_bytes = [0] * len(self.windows)  # of each group, in all of its layers; set by whoever knows
        self.written: list[mx.array] = []

    def open(self) -> PagedStorage:
        """Storage for a new row."""
        return PagedStorage(self, self._kinds)

    def unevaluated(self) -> list[mx.array]:
        """What was written since this was last asked, for whoever evaluates a forward."""
        written, self.written = self.written, []
        return written

    def copy(self, copies: Sequence[tuple[int, int] | None]) -> None:
        """Copy a block of each group to another one, in the pools of its layers."""
        for pool, group in zip(self.pools, self.group_of, strict=True):
            pair = copies[group]
            if pair is not None and pool.keys is not None:
                pool.grow(len(self.blocks[group]), *pool.arrays())
                pool.copy(*pair)

    def room_for_all(self) -> list[mx.array]:
        """The pools of every layer, keys then values, evaluated, with all the blocks that tables name."""
        grown = [
            pool.grow(len(self.blocks[group]), *pool.arrays())
            for pool, group in zip(self.pools, self.group_of, strict=True)
        ]
        arrays = [array for pool in self.pools for array in pool.arrays()]
        if any(grown):
            mx.eval(arrays)
        return arrays

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that rows hold, shared ones once."""
        return sum(n * (b.num_used - b.num_idle) for n, b in zip(self.block_bytes, self.blocks, strict=True))

    @property
    def counts(self) -> dict[str, int]:
        """Blocks of all groups: those that rows hold, that the prompt cache alone keeps, that are free."""
        idle = sum(blocks.num_idle for blocks in self.blocks)
        used = sum(blocks.num_used for blocks in self.blocks)
        return {"held": used - idle, "cached": idle, "free": sum(blocks.num_free for blocks in self.blocks)}

    def keep(self, storage: PagedStorage, start: int, stop: int) -> list[Block]:
        """The blocks of a row's positions `start` to `stop`, kept beyond it."""
        kept = list(zip(*(table.between(start, stop) for table in storage.tables), strict=True))
        for group, blocks in enumerate(self.blocks):
            for block in kept:
                blocks.keep(block[group])
        return kept

    def let_go(self, kept: Block) -> None:
        """Keep a block no longer."""
        for blocks, number in zip(self.blocks, kept, strict=True):
            blocks.let_go(number)

    def gains(self, kept: Block) -> bool:
        """Whether it frees anything to keep this block no longer, now or once one row's window has passed it."""
        return any(
            blocks.num_rows(number) <= (window > 0)
            for blocks, window, number in zip(self.blocks, self.windows, kept, strict=True)
        )

    def check(self, rows: Iterable[PagedStorage], kept: Sequence[Block]) -> None:
        """Every block is accounted for by the tables of `rows` and what is `kept`."""
        tables = [row.tables for row in rows]
        for group, blocks in enumerate(self.blocks):
            held = [number for of_row in tables for number in of_row[group].numbers]
            blocks.check(held, [block[group] for block in kept])

    def trim(self) -> None:
        """Give back the memory of what no table names any more, as far as it lies at the pools' ends."""
        for blocks in self.blocks:
            blocks.trim()
        for pool, group in zip(self.pools, self.group_of, strict=True):
            pool.shrink(len(self.blocks[group]))


def in_place(array: mx.array) -> np.ndarray[Any, Any]:
    """The very memory of an array, evaluated, as NumPy sees it: bits of what it has no type for.

    What is written to `array` by MLX from here on goes elsewhere, as long as somebody has this.
    """
    held = copy.copy(array)  # a name of its own for the memory: `array` may come to stand for another
    if held.dtype == mx.bfloat16:
        held = held.view(mx.uint16)
        mx.eval(held)
    return np.asarray(held)


def _places(block: int) -> slice:
    return slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)


def _first(pool: mx.array, num_blocks: int) -> mx.array:
    """The first blocks as a buffer of their own."""
    nothing = mx.zeros((1, pool.shape[1], 0, pool.shape[3]), pool.dtype)
    kept = mx.concatenate([pool[:, :, : num_blocks * BLOCK_TOKENS], nothing], axis=2)
    mx.eval(kept)
    return kept
