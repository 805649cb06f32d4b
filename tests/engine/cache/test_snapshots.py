"""Snapshots: exact prefixes, longer ones in place of those they go on from, never over the budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.prefix import NAMED_S
from engine.cache.snapshots import Snapshots


def anywhere(length):
    return True


def keep(snapshots, tokens, kind="end", num_bytes=10, key="k", named=False):
    return snapshots.insert(key, tokens, kind, num_bytes, lambda: tokens, named=named)


def held(snapshots, tokens, key="k"):
    return snapshots.longest(key, tokens, anywhere)


def test_only_whole_prefixes_serve():
    snapshots = Snapshots(100)
    keep(snapshots, (1, 2, 3))
    assert [held(snapshots, tokens) for tokens in ((1, 2, 3), (1, 2, 3, 4), (1, 2), (1, 2, 4))] == [3, 3, 0, 0]
    assert held(snapshots, (1, 2, 3), key="other") == 0
    assert snapshots.longest("k", (1, 2, 3), lambda length: length != 3) == 0
    assert snapshots.take("k", (1, 2, 3)) == (1, 2, 3)
    assert held(snapshots, (1, 2, 3)) == 3


@pytest.mark.parametrize("kind", ["history", "cut"])
def test_all_of_a_prompt_serves_where_one_has_ended(kind):
    snapshots = Snapshots(100)
    keep(snapshots, (1,), "end")
    keep(snapshots, (1, 2), kind)
    assert [held(snapshots, tokens) for tokens in ((1, 2), (1, 2, 3))] == [1, 2]
    assert keep(snapshots, (1, 2), "end", 20)
    assert [held(snapshots, tokens) for tokens in ((1, 2), (1, 2, 3))] == [2, 2]
    assert not keep(snapshots, (1, 2), kind)
    assert held(snapshots, (1, 2)) == 2
    assert (len(snapshots), snapshots.num_bytes) == (1, 20)
    snapshots.check()


def test_a_longer_one_of_its_kind_supersedes_it():
    snapshots = Snapshots(100)
    keep(snapshots, (1, 2))
    keep(snapshots, (1,), "history")
    keep(snapshots, (1, 2, 3))
    assert len(snapshots) == 2
    assert (held(snapshots, (1, 2, 4)), held(snapshots, (1, 2, 3))) == (1, 3)
    snapshots.check()


def test_what_several_have_taken_stays():
    snapshots = Snapshots(100)
    keep(snapshots, (1, 2))
    for _ in range(2):
        snapshots.take("k", (1, 2))
    keep(snapshots, (1, 2, 3))
    assert held(snapshots, (1, 2, 4)) == 2


def test_the_coldest_goes_first_and_what_never_fits_is_not_copied():
    snapshots = Snapshots(30)
    for token in range(3):
        keep(snapshots, (token,))
    snapshots.take("k", (0,))
    assert keep(snapshots, (3,), num_bytes=15)
    assert [held(snapshots, (token,)) for token in range(4)] == [1, 0, 0, 1]
    assert not snapshots.insert("k", (9,), "end", 31, lambda: 1 / 0)
    assert not keep(snapshots, (3,))
    assert snapshots.num_evicted == 2
    assert snapshots.clear() == 25
    snapshots.check()


def test_what_nobody_uses_expires():
    now_s = 0.0
    snapshots = Snapshots(30, ttl_s=60, clock=lambda: now_s)
    keep(snapshots, (1,))
    keep(snapshots, (2,))
    now_s = 50
    snapshots.take("k", (1,))
    assert snapshots.expires_in_s() == 10
    now_s = 70
    assert snapshots.expires_in_s() == 0
    assert (held(snapshots, (1,)), held(snapshots, (2,))) == (1, 0)
    assert snapshots.expires_in_s() == 40
    assert snapshots.num_expired == 1
    snapshots.check()


def test_what_was_named_lately_goes_last():
    now_s = 0.0
    snapshots = Snapshots(20, clock=lambda: now_s)
    keep(snapshots, (1,), named=True)
    for token in (2, 3):
        keep(snapshots, (token,))
        assert (held(snapshots, (1,)), held(snapshots, (token,))) == (1, 1)
    snapshots.take("k", (3,), named=True)
    keep(snapshots, (4,))
    assert [held(snapshots, (token,)) for token in (1, 3, 4)] == [0, 1, 1]
    now_s = NAMED_S + 1
    keep(snapshots, (5,))
    assert [held(snapshots, (token,)) for token in (3, 4, 5)] == [0, 1, 1]
    snapshots.check()


@pytest.mark.parametrize(
    ("tokens", "index"),
    [
        ((1, 2, 3), None),  # all of it is kept
        ((1, 2, 3, 4), None),  # it goes on where what is kept ends
        ((1, 2), None),  # it ends on the way
        ((1, 2, 7), 2),
        ((1, 2, 8, 9, 9), 3),  # behind the longest that goes on
        ((1, 7, 7), 1),
        ((5,), None),  # nothing in common
    ],
)
def test_the_first_token_that_differs(tokens, index):
    snapshots = Snapshots(1000)
    for kept, kind in (
        ((1, 2), "cut"),
        ((1, 2, 8), "end"),
        ((1, 2, 3), "end"),
        ((1, 2, 8, 1), "history"),
        ((2,), "end"),
    ):
        keep(snapshots, kept, kind)
    assert len(snapshots) == 5
    assert snapshots.divergence("k", tokens) == index
    assert snapshots.divergence("another key", tokens) is None


steps = st.tuples(
    st.sampled_from(["keep", "take", "wait"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["end", "history", "cut"]),
    st.integers(1, 25),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=40))
def test_any_order_keeps_the_books(sequence):
    now_s = 0.0
    snapshots = Snapshots(60, ttl_s=50, clock=lambda: now_s)
    for step, tokens, kind, number, named in sequence:
        if step == "wait":
            now_s += number
        elif step == "keep":
            keep(snapshots, tokens, kind, number, named=named)
            assert held(snapshots, (*tokens, 2)) == len(tokens)
        elif length := held(snapshots, tokens):
            assert snapshots.take("k", tokens[:length], named=named) == tokens[:length]
        snapshots.check()
    snapshots.clear()
    assert (snapshots.num_bytes, len(snapshots)) == (0, 0)


def test_no_more_is_kept_than_others_leave_free():
    room = [25]
    snapshots = Snapshots(1000, spare=lambda: room[0] - snapshots.num_bytes)
    for number in range(3):
        keep(snapshots, (number,))
    assert (snapshots.num_bytes, snapshots.num_evicted, held(snapshots, (0,))) == (20, 1, 0)
    room[0] = 9
    assert not keep(snapshots, (7,))
    assert held(snapshots, (2,)) == 1
    snapshots.check()


def test_cold_ones_go_when_others_need_their_bytes():
    snapshots = Snapshots(1000)
    for number in range(4):
        keep(snapshots, (number,))
    assert snapshots.evict(11) == 20
    assert [held(snapshots, (number,)) for number in range(4)] == [0, 0, 1, 1]
    assert snapshots.evict(1000) == 20
    snapshots.check()
