"""Blocks are counted right whatever rows and the prompt cache do with them, and none is written that two hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import RUN_BLOCKS, Blocks, BlockTable
from engine.cache.prefix import BLOCK_TOKENS


def test_blocks_that_follow_each_other_are_taken_where_they_can_be():
    blocks = Blocks()
    one, other = blocks.take(), blocks.take()
    assert (one, other, len(blocks)) == (0, 1, RUN_BLOCKS)
    assert blocks.take(other) == 2
    assert blocks.take(one) == 3, "its own next one is taken"
    blocks.drop([1])
    assert blocks.take(one) == 1


def test_who_begins_does_so_where_most_is_free():
    blocks = Blocks()
    for _ in range(2 * RUN_BLOCKS):
        blocks.take()
    assert len(blocks) == 2 * RUN_BLOCKS
    blocks.drop([1, 20, 21])
    assert [blocks.take(0), blocks.take(), blocks.take()] == [1, 20, 21]
    assert blocks.num_free == 0
    assert blocks.take() == 2 * RUN_BLOCKS


def test_a_table_covers_what_was_reserved_and_no_more():
    table = BlockTable(Blocks())
    assert table.reserve(0, 1) is None
    assert (table.end, len(table.numbers)) == (16, 1)
    table.reserve(1, 16)
    assert table.end == 16
    table.reserve(16, 50)
    assert (table.end, list(table.numbers)) == (64, [0, 1, 2, 3])


def test_a_shared_tail_is_replaced_before_it_is_written():
    blocks = Blocks()
    first, second = BlockTable(blocks), BlockTable(blocks)
    first.reserve(0, 40)
    second.begin(first.between(0, 48), 0)
    assert second.lacks(40, 41) == 1
    assert second.reserve(40, 41) == (2, 3)
    assert list(second.numbers) == [0, 1, 3]
    assert list(first.numbers) == [0, 1, 2]
    assert second.lacks(41, 48) == 0
    assert second.reserve(41, 42) is None
    assert first.reserve(40, 41) is None, "nobody shares it any more"


def test_a_kept_tail_is_not_written_either():
    blocks = Blocks()
    table = BlockTable(blocks)
    table.reserve(0, 16)
    blocks.keep(0)
    assert table.reserve(8, 9) == (0, 1)
    assert (blocks.num_used, blocks.num_idle) == (2, 1)


def test_what_lies_behind_a_window_is_let_go():
    blocks = Blocks()
    table = BlockTable(blocks)
    table.reserve(0, 64)
    table.forget(31)
    assert (table.base, list(table.numbers)) == (16, [1, 2, 3])
    table.forget(64)
    assert (table.base, table.end, blocks.num_used) == (64, 64, 0)
    table.reserve(64, 65)
    assert (table.base, table.end) == (64, 80)


def test_a_pool_ends_behind_its_last_block_when_it_is_trimmed():
    blocks = Blocks()
    for _ in range(3 * RUN_BLOCKS):
        blocks.take()
    blocks.drop([*range(RUN_BLOCKS), *range(RUN_BLOCKS + 1, 3 * RUN_BLOCKS)])
    blocks.trim()
    assert (len(blocks), blocks.num_used, blocks.num_free) == (2 * RUN_BLOCKS, 1, 2 * RUN_BLOCKS - 1)
    blocks.drop([RUN_BLOCKS])
    blocks.trim()
    assert (len(blocks), blocks.num_free) == (0, 0)


def test_letting_go_twice_is_a_fault():
    blocks = Blocks()
    blocks.keep(blocks.take())
    blocks.drop([0])
    with pytest.raises(AssertionError, match="twice"):
        blocks.drop([0])


class Sequences(RuleBasedStateMachine):
    """Rows begin, grow, fork, forget and end in any order while some of their blocks are kept."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks()
        self.rows: list[tuple[BlockTable, int]] = []  # and their lengths
        self.kept: list[int] = []

    which = st.integers(0, 100)

    @rule()
    def begin(self):
        self.rows.append((BlockTable(self.blocks), 0))

    @precondition(lambda self: self.rows)
    @rule(which=which, count=st.integers(1, 40))
    def grow(self, which, count):
        at = which % len(self.rows)
        table, length = self.rows[at]
        lacking, used = table.lacks(length, length + count), self.blocks.num_used
        shared = length < table.end and self.blocks.is_shared(table.numbers[(length - table.base) // BLOCK_TOKENS])
        replaced = table.reserve(length, length + count)
        assert self.blocks.num_used == used + lacking
        assert (replaced is not None) == shared
        first = (length - table.base) // BLOCK_TOKENS
        assert not any(self.blocks.is_shared(number) for number in table.numbers[first:])
        self.rows[at] = table, length + count

    @precondition(lambda self: self.rows)
    @rule(which=which)
    def fork(self, which):
        table, length = self.rows[which % len(self.rows)]
        other = BlockTable(self.blocks)
        other.begin(table.numbers, table.base)
        self.rows.append((other, length))

    @precondition(lambda self: self.rows)
    @rule(which=which, window=st.integers(2, 40))
    def forget(self, which, window):
        table, length = self.rows[which % len(self.rows)]
        before = table.base
        table.forget(length + 1 - window)
        assert table.base <= max(0, length + 1 - window, before)

    @precondition(lambda self: self.rows)
    @rule(which=which)
    def keep(self, which):
        table, length = self.rows[which % len(self.rows)]
        whole = (length - table.base) // BLOCK_TOKENS
        for number in table.numbers[:whole]:
            if number not in self.kept:
                self.blocks.keep(number)
                self.kept.append(number)

    @precondition(lambda self: self.kept)
    @rule(which=which)
    def let_go(self, which):
        self.blocks.let_go(self.kept.pop(which % len(self.kept)))

    @precondition(lambda self: self.rows)
    @rule(which=which)
    def end(self, which):
        self.rows.pop(which % len(self.rows))[0].clear()

    @rule()
    def trim(self):
        self.blocks.trim()

    @invariant()
    def holds(self):
        self.blocks.check([n for table, _ in self.rows for n in table.numbers], self.kept)
        for table, length in self.rows:
            assert table.end >= length
            assert table.base % BLOCK_TOKENS == 0

    def teardown(self):
        for table, _ in self.rows:
            table.clear()
        for number in self.kept:
            self.blocks.let_go(number)
        self.blocks.trim()
        assert (len(self.blocks), self.blocks.num_used, self.blocks.num_idle) == (0, 0, 0)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
