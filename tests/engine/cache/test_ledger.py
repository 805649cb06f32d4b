"""The books of what rows have set aside, without a model."""

import pytest

from engine.cache.blocks import Blocks, BlockTable, num_needed
from engine.cache.ledger import BlockLedger, Group, Ledger, SharedContext, Unbounded, tokens_ahead
from engine.cache.prefix import BLOCK_TOKENS, UNBOUNDED_BYTES
from engine.request import Request, Row


def row(num_tokens, limit=100):
    return Row(Request("r", (1,) * num_tokens), limit, 0, None)


class Cold:
    """A prompt cache that drops what it is told to, in entries of 10 bytes."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def evict(self, num_bytes):
        freed = min(-(-num_bytes // 10) * 10, self.num_bytes)
        self.num_bytes -= freed
        return freed


def ledger(budget, *, cold=0, watermark=0.0):
    """One byte for each token."""
    cache = Cold(cold)
    return Ledger(budget, lambda n: n, watermark=watermark, held=lambda: cache.num_bytes, evict=cache.evict), cache


def test_a_prompt_and_two_tokens_are_set_aside_and_given_back():
    books, _ = ledger(30)
    one, two = row(18), row(8)
    assert books.admits(one, decoding=False)
    assert books.spare_bytes() == 10
    assert books.admits(two, decoding=True)
    assert not books.admits(row(1), decoding=False)
    books.frees(one)
    books.frees(one)
    assert books.spare_bytes() == 20
    books.check()


def test_no_more_is_set_aside_than_a_row_can_use():
    assert [tokens_ahead(row(5, limit)) for limit in (1, 2, 3)] == [6, 7, 7]


def test_a_row_grows_by_what_it_says():
    books, _ = ledger(8)
    one = row(5)
    assert books.admits(one, decoding=False)
    one.output.append(1)
    assert books.grows(one)
    assert books.grows(one)
    assert books.spare_bytes() == 0
    one.output.append(1)
    assert not books.grows(one)
    books.check()


def test_what_was_said_counts_when_a_row_starts_again():
    books, _ = ledger(20)
    one = row(5)
    one.output += [1] * 14
    one.start_over()
    assert not books.admits(one, decoding=False)
    one.output.pop()
    assert books.admits(one, decoding=False)
    assert books.spare_bytes() == 0


def test_cold_prefixes_make_room_and_never_count_against_a_row():
    books, cache = ledger(100, cold=100)
    assert books.lacks(98) is None
    assert books.admits(row(33), decoding=False)
    assert cache.num_bytes == 60
    assert books.admits(row(18), decoding=False)
    assert cache.num_bytes == 40
    books.check()


def test_nothing_is_dropped_in_vain():
    books, cache = ledger(100, cold=50)
    assert books.admits(row(48), decoding=False)
    assert not books.admits(row(60), decoding=False)
    assert cache.num_bytes == 50


def test_a_margin_stays_free_only_while_others_decode():
    books, _ = ledger(100, watermark=0.1)
    assert books.admits(row(50), decoding=False)
    assert not books.admits(row(40), decoding=True)
    assert books.admits(row(36), decoding=True)
    books.frees(row(50))
    small, _ = ledger(100, watermark=0.1)
    assert small.admits(row(98), decoding=False)


def test_growth_takes_the_margin():
    books, _ = ledger(100, watermark=0.1)
    one = row(88)
    assert books.admits(one, decoding=True)
    one.output += [1] * 10
    assert books.grows(one)


def test_what_can_never_fit_is_told_with_the_arithmetic():
    books = Ledger(1000 << 20, lambda n: n * 100 << 20, beside=" beside 538 MB of weights")
    assert books.lacks(8) is None
    assert books.lacks(9) == (
        "a prompt of 9 tokens and 2 new ones take 1.2 GB beside 538 MB of weights, "
        "and all that is stored may take 1.0 GB"
    )
    assert SharedContext(10, books).lacks(9) == books.lacks(9)
    assert Unbounded().lacks(1 << 40) is None


@pytest.mark.parametrize("inner", [Unbounded(), ledger(1000)[0]])
def test_rows_share_a_context(inner):
    context = SharedContext(20, inner)
    one, two = row(8), row(7)
    assert context.admits(one, decoding=False)
    assert context.admits(two, decoding=False)
    one.output.append(1)
    assert context.grows(one)
    two.output.append(1)
    assert not context.grows(two)
    context.frees(one)
    assert context.grows(two)
    context.check()


def test_a_context_and_bytes_bound_both():
    books, _ = ledger(12)
    context = SharedContext(20, books)
    one = row(8)
    assert context.admits(one, decoding=False)
    assert not context.admits(row(5), decoding=False)
    assert books.spare_bytes() == 2
    one.output += [1] * 3
    assert not context.grows(one)
    context.check()
    context.frees(one)
    assert books.spare_bytes() == 12


class Storage:
    """A row's tables, without arrays."""

    def __init__(self, groups):
        self.tables = [BlockTable(group.blocks) for group in groups]
        self.length = 0

    def grow(self, windows, num_tokens):
        for window, table in zip(windows, self.tables, strict=True):
            if window:
                table.forget(self.length + 1 - window)
            table.reserve(self.length, self.length + num_tokens)
        self.length += num_tokens

    def free(self):
        for table in self.tables:
            table.clear()


class Shared:
    """Books of blocks of one byte for each token, and a prompt cache that keeps what it is told to."""

    def __init__(self, budget, windows=(0,), piece_tokens=64):
        self.windows = windows
        self.groups = [Group(Blocks(), window, BLOCK_TOKENS) for window in windows]
        self.kept = []
        self.books = BlockLedger(
            budget,
            self.groups,
            row_bytes=lambda n: sum(BLOCK_TOKENS * (num_needed(n, w, piece_tokens) + 1) for w in windows),
            piece_tokens=piece_tokens,
            claims=self.claims,
            accept=self.accept,
            evict=self.evict,
        )

    def claims(self, row):
        """Everybody's prompt begins with all that is kept, the last token of it perhaps not."""
        for blocks in (self.kept, []):
            storage = Storage(self.groups)
            for number, table in enumerate(storage.tables):
                table.begin([block[number] for block in blocks], 0)
            storage.length = min(len(blocks) * BLOCK_TOKENS, len(row.prefill_tokens) - 1)
            yield storage

    def accept(self, row, storage):
        row.storage, row.cursor = storage, storage.length

    def evict(self, num_bytes):
        for block in self.kept:
            if all(group.blocks.is_idle(n) for group, n in zip(self.groups, block, strict=True)):
                self.drop(block)
                return BLOCK_TOKENS
        return 0

    def drop(self, block):
        self.kept.remove(block)
        for group, number in zip(self.groups, block, strict=True):
            group.blocks.let_go(number)

    def keep(self, storage, count):
        """Keep the first blocks of a row."""
        for block in list(zip(*(table.numbers[:count] for table in storage.tables), strict=True)):
            for group, number in zip(self.groups, block, strict=True):
                group.blocks.keep(number)
            self.kept.append(block)

    def started(self, num_tokens):
        one = row(num_tokens)
        assert self.books.admits(one, decoding=False)
        self.books.check()
        one.storage.grow(self.windows, num_tokens - one.storage.length)
        self.books.check()
        return one

    def end(self, one):
        self.books.frees(one)
        one.storage.free()
        one.storage = None


def test_an_adopted_prefix_costs_only_what_comes_behind_it():
    """Blocks of 16 bytes: a row of 70 tokens and two more takes five."""
    shared = Shared(7 * BLOCK_TOKENS)
    first = shared.started(70)
    assert shared.books.spare_bytes() == 2 * BLOCK_TOKENS
    shared.keep(first.storage, 4)
    second = shared.started(70)
    assert shared.books.spare_bytes() == BLOCK_TOKENS
    third = row(70)
    assert shared.books.admits(third, decoding=False)
    assert shared.books.spare_bytes() == 0
    fourth = row(70)
    assert not shared.books.admits(fourth, decoding=False)
    assert fourth.storage is None
    assert not shared.books.admits(fourth, decoding=False)
    shared.end(second)
    assert shared.books.admits(fourth, decoding=False)
    shared.books.check()


def test_a_shared_tail_is_counted_until_it_is_copied():
    shared = Shared(10 * BLOCK_TOKENS)
    first = shared.started(32)
    shared.keep(first.storage, 2)
    second = Storage(shared.groups)
    second.tables[0].begin(first.storage.tables[0].numbers, 0)
    second.length = 24
    group = shared.groups[0]
    assert group.promised_bytes(second.tables[0], 24, 3) == 2 * BLOCK_TOKENS
    second.grow(shared.windows, 1)
    assert group.promised_bytes(second.tables[0], 25, 3) == BLOCK_TOKENS


def test_a_prefix_that_was_promised_stays_when_its_row_has_ended():
    shared = Shared(12 * BLOCK_TOKENS)
    first = shared.started(70)
    shared.keep(first.storage, 4)
    second = row(70)
    assert shared.books.admits(second, decoding=False)
    shared.end(first)
    assert shared.evict(1) == 0
    assert second.storage.length == 64
    shared.end(second)
    assert shared.evict(1) == BLOCK_TOKENS


def test_what_only_the_cache_keeps_goes_when_a_row_grows():
    shared = Shared(5 * BLOCK_TOKENS)
    first = shared.started(30)
    shared.keep(first.storage, 1)
    shared.end(first)
    shared.drop(shared.kept[0])
    one = shared.started(30)
    other = shared.started(10)
    shared.keep(other.storage, 1)
    shared.end(other)
    for _ in range(34):
        one.output.append(1)
        assert shared.books.grows(one)
        one.storage.grow(shared.windows, 1)
        shared.books.check()
    one.output += [1] * BLOCK_TOKENS
    assert not shared.books.grows(one)
    assert shared.kept == []


def test_a_window_takes_no_more_than_it_and_a_piece_however_long_the_row():
    shared = Shared(100 * BLOCK_TOKENS, windows=(0, 32), piece_tokens=16)
    bytes_of = [shared.books.row_bytes(n) for n in (16, 64, 160)]
    assert bytes_of == [BLOCK_TOKENS * n for n in (2 + 2, 5 + 5, 11 + 5)]


def test_what_the_cache_keeps_of_a_window_takes_room_once_the_window_has_passed():
    shared = Shared(24 * BLOCK_TOKENS, windows=(0, 16), piece_tokens=16)
    one = shared.started(16)
    spare = shared.books.spare_bytes()
    assert shared.books.spare_for_cache() == 2 * spare
    shared.keep(one.storage, 1)
    assert shared.books.spare_bytes() == spare - BLOCK_TOKENS, "its row will need another in its place"
    for _ in range(40):
        one.output.append(1)
        assert shared.books.grows(one)
        one.storage.grow(shared.windows, 1)
        shared.books.check()


def test_without_windows_keeping_costs_nothing():
    shared = Shared(10 * BLOCK_TOKENS)
    shared.started(70)
    assert shared.books.spare_for_cache() == UNBOUNDED_BYTES


def test_a_row_that_can_have_no_copy_of_a_shared_tail_does_without():
    """Eight blocks, and a row that was preempted when it had all of them."""
    shared = Shared(8 * BLOCK_TOKENS)
    first = shared.started(112)
    shared.keep(first.storage, 7)
    shared.end(first)
    one = row(40)
    one.output += [1] * 71
    one.start_over()
    assert tokens_ahead(one) == 113
    assert shared.books.admits(one, decoding=False)
    shared.books.check()
    assert one.storage.length == 0
    one.storage.grow(shared.windows, 113)
    shared.books.check()


def test_nothing_is_dropped_in_vain_in_blocks():
    shared = Shared(10 * BLOCK_TOKENS)
    first = shared.started(60)
    shared.keep(first.storage, 3)
    shared.end(first)
    other = row(60)
    shared.kept, kept = [], shared.kept
    assert shared.books.admits(other, decoding=False)
    other.storage.grow((0,), 60)
    shared.kept = kept
    assert not shared.books.admits(row(110), decoding=False)
    assert shared.kept == kept


def test_a_window_that_several_have_begun_with_is_promised_to_each():
    shared = Shared(60 * BLOCK_TOKENS, windows=(0, 16), piece_tokens=16)
    first = shared.started(32)
    shared.keep(first.storage, 2)
    rows = [first, *(shared.started(40) for _ in range(3))]
    spare = shared.books.spare_bytes()
    for block in list(shared.kept):
        shared.drop(block)
    assert shared.books.spare_bytes() <= spare + 4 * BLOCK_TOKENS
    for _ in range(40):
        for one in rows:
            one.output.append(1)
            assert shared.books.grows(one)
            one.storage.grow(shared.windows, 1)
            shared.books.check()


def test_what_can_never_fit_in_blocks_is_told():
    shared = Shared(5 * BLOCK_TOKENS)
    assert shared.books.lacks(62) is None
    assert shared.books.lacks(63) == (
        "a prompt of 63 tokens and 2 new ones take 96 B, and all that is stored may take 80 B"
    )
