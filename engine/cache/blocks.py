"""Which blocks of a pool are in use, and by how many: numbers and counts, no arrays.

A block holds 16 positions of a row in every layer of a group. Whoever names a block in a table or keeps it for
others holds it; the last one that lets go frees it. A block that several hold is written by none of them.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.cache.prefix import BLOCK_TOKENS

RUN_BLOCKS = 16  # a slab is a whole number of runs: one, or
SLAB_SHARE = 8  # the eighth part of the pool


def num_needed(num_tokens: int, window: int, piece_tokens: int) -> int:
    """The most blocks that a row of so many tokens holds at once, where it sees `window` positions, 0: all.

    A window lets go of its own before each piece, which is at most `piece_tokens` long.
    """
    most = -(-num_tokens // BLOCK_TOKENS)
    return min(most, -(-(window + piece_tokens) // BLOCK_TOKENS) + 1) if window else most


class Blocks:
    """The blocks of one pool by their numbers. The pool grows by slabs, when no block is free.

    Rows hold blocks; the prompt cache keeps them, each once. `num_idle` are those that it alone keeps.
    """

    def __init__(self) -> None:
        self.limit: int | None = None  # most blocks that the pool grows to ahead of need
        self._holders: list[int] = []  # of each block, the prompt cache among them
        self._is_kept = bytearray()
        self._free_in_run: list[int] = []
        self.num_free = 0
        self.num_kept = 0
        self.num_idle = 0

    def __len__(self) -> int:
        """How many blocks the pool has."""
        return len(self._holders)

    @property
    def num_used(self) -> int:
        """How many blocks somebody holds."""
        return len(self) - self.num_free

    def take(self, after: int | None = None) -> int:
        """A block that nobody held: the one behind `after`, if it is free, for what lies together is read faster.

        Else the first free one where most are free, so that whoever takes it can go on behind it.
        """
        if not self.num_free:
            self._grow()
        block = len(self) if after is None else after + 1
        if block >= len(self) or self._holders[block]:
            run = max(range(len(self._free_in_run)), key=self._free_in_run.__getitem__)
            block = self._holders.index(0, run * RUN_BLOCKS)
        self._holders[block] = 1
        self._count_free(block, -1)
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that others hold, too."""
        for block in blocks:
            assert self._holders[block] > 0, "a free block holds nothing"
            self.num_idle -= self.is_idle(block)
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Let go of blocks."""
        for block in blocks:
            assert self._holders[block] > self._is_kept[block], "a block was let go twice"
            self._holders[block] -= 1
            self.num_idle += self.is_idle(block)
            if not self._holders[block]:
                self._count_free(block, 1)

    def keep(self, block: int) -> None:
        """Keep a block that a row holds, also when it does no longer."""
        assert not self._is_kept[block], "a block is kept once"
        self.hold([block])
        self._is_kept[block] = True
        self.num_kept += 1

    def let_go(self, block: int) -> None:
        """Keep a block no longer."""
        assert self._is_kept[block], "a block was let go that was not kept"
        self.num_idle -= self.is_idle(block)
        self._is_kept[block] = False
        self.num_kept -= 1
        self.drop([block])

    def is_shared(self, block: int) -> bool:
        """Whether it is not for one row alone to write to this block."""
        return self._holders[block] > 1

    def is_idle(self, block: int) -> bool:
        """Whether the prompt cache alone keeps this block."""
        return self._is_kept[block] == self._holders[block] == 1

    def num_shared(self, blocks: Sequence[int]) -> int:
        """How many of these blocks others hold, too."""
        return sum(map(self.is_shared, blocks))

    def num_rows(self, block: int) -> int:
        """How many rows hold this block."""
        return self._holders[block] - self._is_kept[block]

    def trim(self) -> None:
        """Forget the free blocks at the pool's end, whole runs of them."""
        while self._free_in_run and self._free_in_run[-1] == len(self) - (len(self._free_in_run) - 1) * RUN_BLOCKS:
            count = self._free_in_run.pop()
            self.num_free -= count
            del self._holders[-count:], self._is_kept[-count:]

    def check(self, held: Iterable[int], kept: Iterable[int]) -> None:
        """Rows hold what `held` names, once for each of them, the cache keeps `kept`, and the rest is free."""
        kept = list(kept)
        counted = Counter(held) + Counter(kept)
        assert counted == Counter({b: n for b, n in enumerate(self._holders) if n}), (
            "a block is lost or freed early"
        )
        assert sorted(kept) == [b for b, is_kept in enumerate(self._is_kept) if is_kept], (
            "what is kept is miscounted"
        )
        assert self.num_kept == len(kept), "what is kept is miscounted"
        runs = [self._holders[at : at + RUN_BLOCKS] for at in range(0, len(self), RUN_BLOCKS)]
        assert [run.count(0) for run in runs] == self._free_in_run, "the free blocks are miscounted"
        assert sum(self._free_in_run) == self.num_free, "the free blocks are miscounted"
        assert self.num_idle == sum(map(self.is_idle, range(len(self)))), "the idle blocks are miscounted"

    def _grow(self) -> None:
        """Add a slab: to the end of a run, but no more than `limit` allows, and one block at least."""
        before = len(self)
        after = -(-(before + max(1, before // SLAB_SHARE)) // RUN_BLOCKS) * RUN_BLOCKS
        after = max(before + 1, after if self.limit is None else min(after, self.limit))
        self._holders += [0] * (after - before)
        self._is_kept += bytes(after - before)
        self._free_in_run += [0] * (-(-after // RUN_BLOCKS) - len(self._free_in_run))
        for block in range(before, after):
            self._count_free(block, 1)

    def _count_free(self, block: int, change: int) -> None:
        self._free_in_run[block // RUN_BLOCKS] += change
        self.num_free += change


class BlockTable:
    """The blocks of one row, in the order of their positions, which begin at `base`; what was before is let go."""

    __slots__ = ("_blocks", "base", "numbers")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.base = 0
        self.numbers = array("i")

    @property
    def end(self) -> int:
        """The position behind the last block."""
        return self.base + len(self.numbers) * BLOCK_TOKENS

    def begin(self, numbers: Sequence[int], base: int) -> None:
        """Let an empty table begin with blocks that others hold, the first of them at `base`."""
        assert not self.numbers, "the table has begun"
        assert base % BLOCK_TOKENS == 0, "a table begins with a whole block"
        self._blocks.hold(numbers)
        self.base = base
        self.numbers.extend(numbers)

    def lacks(self, start: int, stop: int) -> int:
        """How many blocks `reserve` would take."""
        return max(0, -(-(stop - self.end) // BLOCK_TOKENS)) + self.shares(start)

    def shares(self, position: int) -> bool:
        """Whether the block of `position` is here and others hold it, too: to write there is to copy it."""
        return position < self.end and self._blocks.is_shared(self.numbers[self._place(position)])

    def reserve(self, start: int, stop: int) -> tuple[int, int] | None:
        """Let the positions `start` to `stop` be written: take what is missing, and replace a shared tail.

        What was replaced, and by what: its positions before `start` are to be copied.
        """
        replaced = None
        if self.shares(start):
            at = self._place(start)
            tail = self.numbers[at]
            self.numbers[at] = self._blocks.take(self.numbers[at - 1] if at else None)
            self._blocks.drop([tail])
            replaced = tail, self.numbers[at]
        while self.end < stop:
            self.numbers.append(self._blocks.take(self.numbers[-1] if self.numbers else None))
        return replaced

    def forget(self, position: int) -> None:
        """Let go of the blocks whose positions are all before `position`."""
        count = min(max(0, position - self.base) // BLOCK_TOKENS, len(self.numbers))
        self._blocks.drop(self.numbers[:count])
        del self.numbers[:count]
        self.base += count * BLOCK_TOKENS

    def between(self, start: int, stop: int) -> Sequence[int]:
        """The blocks of the positions `start` to `stop`, both multiples of a block's."""
        assert self.base <= start <= stop <= self.end, "these positions are not held"
        return self.numbers[self._place(start) : self._place(stop)]

    def clear(self) -> None:
        """Let go of everything."""
        self._blocks.drop(self.numbers)
        del self.numbers[:]

    def _place(self, position: int) -> int:
        """Where in the table the block of `position` is."""
        return (position - self.base) // BLOCK_TOKENS
