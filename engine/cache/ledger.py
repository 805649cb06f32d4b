"""Who may store how much: the books of what rows have set aside, kept before a byte is taken.

An allocation that is too large kills the process, so the scheduler asks here first. `Ledger` counts bytes, for
rows that own their buffers, `BlockLedger` blocks, for rows that share them, and `SharedContext` tokens, for rows
that share one context. They know no arrays and no model: what a row takes and what can be dropped for it is given.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.cache.blocks import Blocks, BlockTable, num_needed
from engine.cache.prefix import UNBOUNDED_BYTES
from engine.model.memory import human_bytes
from engine.request import Row

AHEAD_TOKENS = 2  # beyond those that are there: one to be stored, one that a step in flight has not given yet


class Memory(Protocol):
    """What the scheduler asks. A row is `admitted` before its first piece, `grows` before each step, and is freed
    when it has ended or gives its place away. What is set aside for a row is never given to another.
    """

    def admits(self, row: Row, *, decoding: bool) -> bool:
        """Set aside what the row prefills and two further tokens, dropping cold prefixes if that makes it fit.

        While others are `decoding` a margin stays free for them to grow. False: nothing was set aside.
        """
        ...

    def grows(self, row: Row) -> bool:
        """See to it that an admitted row has room for its next token, as in `admits`, but for the margin.

        False: it has the room that it had, which is enough for one more step.
        """
        ...

    def frees(self, row: Row) -> None:
        """Forget the row; one that has nothing set aside is no error."""
        ...

    def lacks(self, num_tokens: int) -> str | None:
        """Why a prompt of so many tokens could never be admitted, or None. The same for ever, on any thread."""
        ...

    def check(self) -> None:
        """What is set aside adds up and stays within bounds."""
        ...


def tokens_ahead(row: Row) -> int:
    """How many tokens `row` has to have room for: those that it has, those that it drafts, and two more if it
    may go on for so long.
    """
    return min(len(row.request.prompt) + len(row.output) + row.num_drafted + AHEAD_TOKENS, row.most_tokens)


class Unbounded:
    """Rows take what they need."""

    def admits(self, row: Row, *, decoding: bool) -> bool:
        return True

    def grows(self, row: Row) -> bool:
        return True

    def frees(self, row: Row) -> None:
        pass

    def lacks(self, num_tokens: int) -> str | None:
        return None

    def check(self) -> None:
        pass


class Ledger:
    """`budget_bytes` for rows and prompt cache together, where each row owns its buffers.

    `row_bytes` says what the buffers of a row of so many tokens take at most. `held` are the bytes of the prompt
    cache, `evict` drops cold ones of them and says how many. They never count against a row: what could be dropped
    is dropped when a row needs it. An adopted prefix is copied into the row, so it costs its bytes once more.
    """

    def __init__(
        self,
        budget_bytes: int,
        row_bytes: Callable[[int], int],
        *,
        watermark: float = 0.0,
        held: Callable[[], int] = lambda: 0,
        evict: Callable[[int], int] = lambda num_bytes: 0,
        beside: str = "",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.row_bytes = row_bytes
        self._margin_bytes = int(watermark * budget_bytes)
        self._held = held
        self._evict = evict
        self._beside = beside
        self._rows: dict[Row, int] = {}
        self._taken_bytes = 0

    def spare_bytes(self) -> int:
        """What neither rows nor the prompt cache have."""
        return self.budget_bytes - self._taken_bytes - self._held()

    def admits(self, row: Row, *, decoding: bool) -> bool:
        assert row not in self._rows, "a row is admitted once"
        return self._take(row, self._margin_bytes if decoding else 0)

    def grows(self, row: Row) -> bool:
        assert row in self._rows, "a row that grows was admitted"
        return self._take(row, 0)

    def frees(self, row: Row) -> None:
        self._taken_bytes -= self._rows.pop(row, 0)

    def lacks(self, num_tokens: int) -> str | None:
        wanted_bytes = self.row_bytes(num_tokens + AHEAD_TOKENS)
        return _lacking(num_tokens, wanted_bytes, self.budget_bytes, self._beside)

    def check(self) -> None:
        assert self._taken_bytes == sum(self._rows.values()), "bytes of rows are lost"
        assert self.spare_bytes() >= 0, "rows and prompt cache exceed the budget"

    def _take(self, row: Row, margin_bytes: int) -> bool:
        """Set aside what `row` takes now in place of what it took, with the margin left free."""
        wanted, taken = self.row_bytes(tokens_ahead(row)), self._rows.get(row, 0)
        if row in self._rows and wanted <= taken:
            return True
        missing = wanted - taken + margin_bytes
        if missing > self.budget_bytes - self._taken_bytes:
            return False
        if missing > self.spare_bytes():
            self._evict(missing - self.spare_bytes())
        if missing > self.spare_bytes():
            return False
        self._rows[row] = wanted
        self._taken_bytes += wanted - taken
        return True


@dataclass(frozen=True, slots=True)
class Group:
    """The blocks of layers that see `window` positions, 0: all of them. One takes `num_bytes`."""

    blocks: Blocks
    window: int
    num_bytes: int

    def promised_bytes(self, table: BlockTable, length: int, num_needed: int) -> int:
        """What a row of `length` tokens is still to take, of `num_needed` blocks.

        A block that others hold stays theirs once a row's window has passed it; a shared tail is copied.
        """
        missing = num_needed - len(table.numbers)
        missing += self.blocks.num_shared(table.numbers) if self.window else table.shares(length)
        return self.num_bytes * max(0, missing)


class BlockLedger:
    """`budget_bytes` for the blocks that rows and prompt cache share.

    `row_bytes` says what the blocks of a row of so many tokens take at most, where it shares none. A block counts
    once, whoever holds it, so an adopted prefix costs a row only what comes behind it; what the prompt cache alone
    keeps is dropped where a row needs it. `claims` gives a row storage that begins with what it can reuse, which
    so stays from admission on, then with less, for a shared tail takes a block more; `accept` makes it the row's.
    `evict` drops cold blocks. `beside_row` says what a row of so many tokens takes elsewhere.
    """

    def __init__(
        self,
        budget_bytes: int,
        groups: Sequence[Group],
        *,
        row_bytes: Callable[[int], int],
        piece_tokens: int,
        claims: Callable[[Row], Iterable[Any]],
        accept: Callable[[Row, Any], None],
        evict: Callable[[int], int],
        watermark: float = 0.0,
        beside: str = "",
        beside_row: Callable[[int], int] = lambda num_tokens: 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.row_bytes = row_bytes
        self._beside_row = beside_row
        self._groups = groups
        self._piece_tokens = piece_tokens
        self._claims = claims
        self._accept = accept
        self._evict = evict
        self._margin_bytes = int(watermark * budget_bytes)
        self._beside = beside
        self._needed: dict[Row, tuple[int, ...]] = {}  # blocks of each group, all in all
        self._beside_bytes: dict[Row, int] = {}  # set aside for what rows take beside their blocks
        self._refused: tuple[Row, int] | None = None  # and what was spare, but for what can be dropped

    def spare_bytes(self) -> int:
        """What is neither in use nor set aside for a row that will use it."""
        used = sum(group.num_bytes * group.blocks.num_used for group in self._groups)
        promised = sum(self._promised(row.storage, needed) for row, needed in self._needed.items())
        return self.budget_bytes - used - promised - sum(self._beside_bytes.values())

    def spare_for_cache(self) -> int:
        """How many bytes of blocks the prompt cache may begin to keep: those of windows take room of their own as
        soon as their row lets them go; others are there already."""
        passing = sum(group.num_bytes for group in self._groups if group.window)
        if not passing:
            return UNBOUNDED_BYTES
        return max(self.spare_bytes(), 0) * sum(group.num_bytes for group in self._groups) // passing

    def admits(self, row: Row, *, decoding: bool) -> bool:
        assert row not in self._needed, "a row is admitted once"
        possible = self.spare_bytes() + self._droppable_bytes()
        if self._needed and self._refused is not None and self._refused[0] is row and possible <= self._refused[1]:
            return False
        needed = self._needed_by(row)
        beside = self._beside_row(tokens_ahead(row))
        for storage in self._claims(row):
            margin = self._margin_bytes if decoding else 0
            if self._makes_room(self._promised(storage, needed) + beside + margin):
                self._accept(row, storage)
                self._needed[row], self._beside_bytes[row] = needed, beside
                return True
            storage.free()
        self._refused = row, possible
        return False

    def grows(self, row: Row) -> bool:
        needed, before = self._needed_by(row), self._needed[row]
        beside = max(self._beside_row(tokens_ahead(row)), self._beside_bytes[row])
        if needed == before and beside == self._beside_bytes[row]:
            return True
        more = self._promised(row.storage, needed) - self._promised(row.storage, before)
        if not self._makes_room(more + beside - self._beside_bytes[row]):
            return False
        self._needed[row], self._beside_bytes[row] = needed, beside
        return True

    def frees(self, row: Row) -> None:
        self._needed.pop(row, None)
        self._beside_bytes.pop(row, None)

    def lacks(self, num_tokens: int) -> str | None:
        wanted_bytes = self.row_bytes(num_tokens + AHEAD_TOKENS)
        return _lacking(num_tokens, wanted_bytes, self.budget_bytes, self._beside)

    def check(self) -> None:
        assert self.spare_bytes() >= 0, "rows and prompt cache exceed the budget"

    def _needed_by(self, row: Row) -> tuple[int, ...]:
        return tuple(num_needed(tokens_ahead(row), group.window, self._piece_tokens) for group in self._groups)

    def _promised(self, storage: Any, needed: Sequence[int]) -> int:
        """Bytes of the blocks that a row needs and does not have yet."""
        if storage is None:
            return sum(group.num_bytes * count for group, count in zip(self._groups, needed, strict=True))
        return sum(
            group.promised_bytes(table, storage.length, count)
            for group, count, table in zip(self._groups, needed, storage.tables, strict=True)
        )

    def _makes_room(self, num_bytes: int) -> bool:
        """Drop cold blocks until so many bytes are spare; whether they are. Nothing is dropped in vain."""
        spare = self.spare_bytes()
        if spare + self._droppable_bytes() < num_bytes:
            return False
        while spare < num_bytes and self._evict(min(num_bytes - spare, self._groups[0].num_bytes)):
            spare = self.spare_bytes()
        return spare >= num_bytes

    def _droppable_bytes(self) -> int:
        """The most that dropping what the prompt cache keeps could free; with windows it may be less."""
        return sum(
            group.num_bytes * (group.blocks.num_kept if group.window else group.blocks.num_idle)
            for group in self._groups
        )


class SharedContext:
    """`context_tokens` for all rows together, on top of what `memory` says."""

    def __init__(self, context_tokens: int, memory: Memory, *, watermark: float = 0.0) -> None:
        self.context_tokens = context_tokens
        self._memory = memory
        self._margin_tokens = int(watermark * context_tokens)
        self._rows: dict[Row, int] = {}
        self._taken_tokens = 0

    def admits(self, row: Row, *, decoding: bool) -> bool:
        assert row not in self._rows, "a row is admitted once"
        margin = self._margin_tokens if decoding else 0
        return self._fits(row, margin) and self._memory.admits(row, decoding=decoding) and self._take(row)

    def grows(self, row: Row) -> bool:
        return self._fits(row, 0) and self._memory.grows(row) and self._take(row)

    def frees(self, row: Row) -> None:
        self._taken_tokens -= self._rows.pop(row, 0)
        self._memory.frees(row)

    def lacks(self, num_tokens: int) -> str | None:
        return self._memory.lacks(num_tokens)

    def check(self) -> None:
        assert self._taken_tokens == sum(self._rows.values()), "tokens of rows are lost"
        assert self._taken_tokens <= self.context_tokens, "rows exceed the context that they share"
        self._memory.check()

    def _fits(self, row: Row, margin_tokens: int) -> bool:
        more = tokens_ahead(row) - self._rows.get(row, 0)
        return more <= 0 or self._taken_tokens + more + margin_tokens <= self.context_tokens

    def _take(self, row: Row) -> bool:
        self._taken_tokens += tokens_ahead(row) - self._rows.get(row, 0)
        self._rows[row] = tokens_ahead(row)
        return True


def _lacking(num_tokens: int, wanted_bytes: int, budget_bytes: int, beside: str) -> str | None:
    """The arithmetic of a prompt that does not fit, or None where it does."""
    if wanted_bytes <= budget_bytes:
        return None
    return (
        f"a prompt of {num_tokens} tokens and {AHEAD_TOKENS} new ones take {human_bytes(wanted_bytes)}{beside}"
        f", and all that is stored may take {human_bytes(budget_bytes)}"
    )
