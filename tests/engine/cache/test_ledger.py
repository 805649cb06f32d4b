"""The books of what rows have set aside, without a model."""

import pytest

from engine.cache.ledger import Ledger, SharedContext, Unbounded, tokens_ahead
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
