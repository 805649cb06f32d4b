"""Prompt lookup: the longest end that came before, and what followed it when it last did."""

import random

import pytest

from engine.speculate.lookup import KINDS, LONGEST, MOST_SAME, SHORTEST, LookupIndex, kind_of


def searched(tokens: list[int], num_tokens: int) -> tuple[int, ...]:
    """The same by looking through everything."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[len(tokens) - size :]:
                followed = tokens[place:]
                return tuple((followed * num_tokens)[:num_tokens])
    return ()


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_finds(seed):
    chance = random.Random(seed)
    tokens = [chance.randrange(3) for _ in range(chance.randrange(40))]
    index = LookupIndex(tokens[:7])
    for token in tokens[7:]:
        assert index.proposal(5)[0] == searched(index.tokens, 5)
        index.extend([token])
    assert index.tokens == tokens


def test_a_longer_match_wins_over_a_later_one():
    index = LookupIndex([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3])
    assert index.proposal(1) == ((70,), 3)


def test_of_equal_matches_the_last_wins():
    assert LookupIndex([1, 2, 3, 70, 1, 2, 3, 80, 1, 2, 3]).proposal(1) == ((80,), 3)


def test_what_never_came_before_proposes_nothing():
    assert LookupIndex([1, 2, 3, 4]).proposal(7) == ((), 0)
    assert LookupIndex([]).proposal(7) == ((), 0)
    assert LookupIndex([5]).proposal(7) == ((), 0)


def test_a_repetition_is_gone_round_again():
    assert LookupIndex([8, 1, 2, 1, 2, 1, 2]).proposal(5) == ((1, 2, 1, 2, 1), 4)


@pytest.mark.parametrize("num_same", range(2, 12))
def test_how_much_came_before_is_told(num_same):
    same = list(range(10, 10 + num_same))
    index = LookupIndex([1, *same, 70, 2, *same])
    assert index.proposal(1) == ((70,), min(num_same, MOST_SAME))
    assert KINDS[kind_of(num_same)][0] <= num_same
    assert all(least > num_same for least, _ in KINDS[kind_of(num_same) + 1 :])
