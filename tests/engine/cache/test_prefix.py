"""The prefix tree: whole blocks, borrowed by many, cold ones evicted first, never over the budget."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.prefix import BLOCK_TOKENS, NAMED_S, PrefixTree, num_same

BYTES = 10


def blocks(*numbers, rest=0):
    """Tokens of whole blocks, each made of one number, and some of another block."""
    return tuple(number for number in numbers for _ in range(BLOCK_TOKENS)) + (99,) * rest


def fill(tree, tokens, key="k", first=0, named=False):
    """Hold `tokens`; each block's span is what leads to it."""
    return tree.insert(
        key,
        tokens,
        BYTES,
        lambda start, stop: [tokens[: at + BLOCK_TOKENS] for at in range(start, stop, BLOCK_TOKENS)],
        first=first,
        named=named,
    )


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_whole_blocks_are_found_and_rests_are_not():
    tree = PrefixTree(1000)
    assert fill(tree, blocks(1, 2, 3, rest=5)) == 3
    assert fill(tree, blocks(1, 2, 3, rest=15)) == 0
    for tokens, held in {
        blocks(1, 2, 3, 4): 48, blocks(1, 2, rest=9): 32, blocks(1): 16, blocks(1)[:-1]: 0, blocks(2, 3): 0,
    }.items():  # fmt: skip
        assert tree.held("k", tokens) == held
    assert tree.held("another key", blocks(1)) == 0
    tree.check()


def test_adoption_takes_nothing_away():
    tree = PrefixTree(1000)
    fill(tree, blocks(1, 2))
    loans = [tree.borrow("k", blocks(1, 2, 3)) for _ in range(12)]
    assert all(loan.spans == [blocks(1), blocks(1, 2)] for loan in loans)
    tree.check()
    for loan in loans:
        tree.release(loan)
    assert tree.held("k", blocks(1, 2)) == 32
    assert tree.num_borrowed == 0
    with pytest.raises(AssertionError, match="released once"):
        tree.release(loans[0])


def test_the_least_recently_used_end_goes_first():
    tree = PrefixTree(4 * BYTES)
    fill(tree, blocks(1, 2))
    fill(tree, blocks(1, 3))
    fill(tree, blocks(4))
    tree.release(tree.borrow("k", blocks(1, 2)))
    fill(tree, blocks(5))
    assert [tree.held("k", blocks(*path)) // BLOCK_TOKENS for path in ((1, 2), (1, 3), (4,), (5,))] == [2, 1, 1, 1]
    fill(tree, blocks(6, 7, 8))
    assert [tree.held("k", blocks(*path)) // BLOCK_TOKENS for path in ((1, 2), (4,), (5,), (6, 7, 8))] == [
        0,
        0,
        1,
        3,
    ]
    tree.check()
    assert tree.num_evicted == 4


def test_what_is_borrowed_or_stood_on_is_not_evicted_and_less_is_kept():
    tree = PrefixTree(3 * BYTES)
    fill(tree, blocks(1, 2))
    loan = tree.borrow("k", blocks(1, 2))
    assert fill(tree, blocks(3, 4)) == 1
    assert fill(tree, blocks(1, 2, 5, 6)) == 1
    assert fill(tree, blocks(7, 8)) == 1
    assert tree.clear() == BYTES
    assert tree.num_bytes == 2 * BYTES
    tree.release(loan)
    assert tree.clear() == 2 * BYTES
    tree.check()
    assert tree.num_blocks == 0


def test_nothing_is_taken_that_will_not_be_kept():
    tree = PrefixTree(BYTES - 1)
    assert tree.insert("k", blocks(1), BYTES, lambda start, stop: pytest.fail("nothing fits")) == 0
    tree = PrefixTree(1000)
    assert fill(tree, blocks(1, 2), first=16) == 0
    fill(tree, blocks(1))
    assert fill(tree, blocks(1, 2), first=16) == 1

    def fails(start, stop):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        tree.insert("k", blocks(1, 2, 3), BYTES, fails)
    tree.check()
    assert tree.num_bytes == 2 * BYTES


def test_no_more_is_held_than_others_leave_free():
    room = [25]
    tree = PrefixTree(1000, spare=lambda: room[0] - tree.num_bytes)
    assert fill(tree, blocks(1, 2, 3)) == 2
    assert fill(tree, blocks(4, 5)) == 2
    assert (tree.num_bytes, tree.num_evicted) == (20, 2)
    room[0] = 5
    assert fill(tree, blocks(6)) == 0
    assert tree.num_bytes == 0


def test_cold_blocks_go_when_others_need_their_bytes():
    tree = PrefixTree(1000)
    fill(tree, blocks(1, 2, 3))
    loan = tree.borrow("k", blocks(1))
    assert tree.evict(0) == 0
    assert tree.evict(11) == 20
    assert tree.held("k", blocks(1, 2, 3)) == 16
    assert tree.evict(10) == 0
    tree.release(loan)
    assert tree.evict(1000) == 10
    tree.check()


def test_what_nobody_uses_expires():
    clock = Clock()
    tree = PrefixTree(1000, ttl_s=60, clock=clock)
    fill(tree, blocks(1, 2))
    clock.now_s = 50
    tree.release(tree.borrow("k", blocks(1)))
    assert tree.expires_in_s() == 10
    clock.now_s = 70
    assert tree.expires_in_s() == 0
    assert tree.held("k", blocks(1, 2)) == 16
    assert tree.expires_in_s() == 40
    loan = tree.borrow("k", blocks(1))
    clock.now_s = 500
    assert tree.expires_in_s() == inf
    assert tree.held("k", blocks(1)) == 16
    tree.release(loan)
    assert tree.held("k", blocks(1)) == 0
    tree.check()
    assert (tree.num_expired, tree.num_evicted, tree.num_bytes) == (2, 0, 0)


def test_what_was_named_lately_goes_last():
    clock = Clock()
    tree = PrefixTree(4 * BYTES, clock=clock)
    fill(tree, blocks(1, 2), named=True)
    fill(tree, blocks(3))
    fill(tree, blocks(1, 7))  # on a named block, and not named itself
    fill(tree, blocks(4))
    assert [tree.held("k", blocks(*path)) for path in ((1, 2), (1, 7), (3,), (4,))] == [32, 32, 0, 16]
    fill(tree, blocks(5))
    fill(tree, blocks(6))
    assert [tree.held("k", blocks(*path)) for path in ((1, 2), (1, 7), (4,), (5,), (6,))] == [32, 16, 0, 16, 16]
    clock.now_s = NAMED_S - 1
    tree.release(tree.borrow("k", blocks(1), named=True))
    clock.now_s = NAMED_S + 1
    fill(tree, blocks(8))
    assert tree.held("k", blocks(1, 2)) == 16  # named too long ago, but for its first block
    clock.now_s = 2 * NAMED_S
    for number in range(10, 14):
        fill(tree, blocks(number))
    assert tree.held("k", blocks(1)) == 0
    tree.check()


def test_named_blocks_leave_where_nothing_else_is_left():
    tree = PrefixTree(2 * BYTES)
    fill(tree, blocks(1, 2), named=True)
    assert fill(tree, blocks(3, 4)) == 2
    assert tree.held("k", blocks(1)) == 0
    tree.check()


@pytest.mark.parametrize("same", range(6))
def test_tokens_that_are_the_same(same):
    one = (1, 2, 3, 4, 5)
    assert num_same(one, (*one[:same], *range(10, 15))) == num_same((*one[:same], 9), one) == same
    assert num_same(one, one[:same]) == num_same(one[:same], one) == same


@pytest.mark.parametrize(
    ("tokens", "index"),
    [
        (blocks(1, 2, 3), None),  # all of it is held
        (blocks(1, 2, 3, 4), None),  # it goes on where what is held ends
        (blocks(1, 2, rest=0) + (3,) * 5, None),  # it ends on the way
        (blocks(1, 2) + (3,) * 5 + (4,), 37),
        ((*blocks(1), 9), 16),
        ((1,) * 7 + (2,), 7),
        ((5,), None),  # nothing in common
    ],
)
def test_the_first_token_that_differs(tokens, index):
    tree = PrefixTree(1000)
    fill(tree, blocks(1, 2, 3))
    fill(tree, blocks(1, 2, 8))
    assert tree.divergence("k", tokens) == index
    assert tree.divergence("another key", tokens) is None


def test_what_is_dropped_is_told():
    dropped = []
    tree = PrefixTree(2 * BYTES, dropped=dropped.append)
    fill(tree, blocks(1, 2))
    fill(tree, blocks(3))
    assert dropped == [blocks(1, 2)]
    tree.clear()
    assert dropped == [blocks(1, 2), blocks(1), blocks(3)]
    assert tree.spans == []


class Sequences(RuleBasedStateMachine):
    """Any order of inserting, borrowing, giving back, waiting and clearing, with a budget of seven blocks."""

    prompts = st.lists(st.integers(0, 2), max_size=5).map(lambda path: blocks(*path, rest=3))
    keys = st.sampled_from("ab")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.tree = PrefixTree(7 * BYTES + 3, ttl_s=10, clock=self.clock)
        self.loans = []

    @rule(tokens=prompts, key=keys, first=st.sampled_from([0, 0, 16, 32]), named=st.booleans())
    def insert(self, tokens, key, first, named):
        before = self.tree.held(key, tokens)
        added = fill(self.tree, tokens, key, first, named)
        assert self.tree.held(key, tokens) == before + added * BLOCK_TOKENS

    @rule(tokens=prompts, key=keys, named=st.booleans())
    def borrow(self, tokens, key, named):
        held = self.tree.held(key, tokens)
        loan = self.tree.borrow(key, tokens, named=named)
        assert loan.spans == [tokens[:stop] for stop in range(BLOCK_TOKENS, held + 1, BLOCK_TOKENS)]
        self.loans.append((key, tokens[:held], loan))

    @rule(tokens=prompts, key=keys)
    def borrow_in_part(self, tokens, key):
        held = self.tree.held(key, tokens, in_part=True)
        assert 0 <= held - self.tree.held(key, tokens) < BLOCK_TOKENS
        loan = self.tree.borrow(key, tokens[:held])
        assert len(loan.nodes) == -(-held // BLOCK_TOKENS)
        if loan.nodes:
            assert loan.spans[-1][:held] == tokens[:held]
        self.tree.release(loan)

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 100))
    def release(self, which):
        self.tree.release(self.loans.pop(which % len(self.loans))[2])

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def clear(self):
        self.tree.clear()

    @invariant()
    def holds(self):
        self.tree.check()
        for key, tokens, _ in self.loans:
            assert self.tree.held(key, tokens) == len(tokens)

    def teardown(self):
        for _, _, loan in self.loans:
            self.tree.release(loan)
        self.tree.clear()
        assert (self.tree.num_bytes, self.tree.num_blocks, self.tree.num_borrowed) == (0, 0, 0)
        self.tree.check()


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
