"""Prompt lookup: the longest end that came before, and what followed it when it last did."""

import random

import pytest

from engine.speculate.lookup import LONGEST, SHORTEST, LookupIndex


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
        assert index.proposal(5) == searched(index.tokens, 5)
        index.extend([token])
    assert index.tokens == tokens


def test_a_longer_match_wins_over_a_later_one():
    index = LookupIndex([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3])
    assert index.proposal(1) == (70,)


def test_of_equal_matches_the_last_wins():
    assert LookupIndex([1, 2, 3, 70, 1, 2, 3, 80, 1, 2, 3]).proposal(1) == (80,)


def test_what_never_came_before_proposes_nothing():
    assert LookupIndex([1, 2, 3, 4]).proposal(7) == ()
    assert LookupIndex([]).proposal(7) == ()
    assert LookupIndex([5]).proposal(7) == ()


def test_a_repetition_is_gone_round_again():
    assert LookupIndex([8, 1, 2, 1, 2, 1, 2]).proposal(5) == (1, 2, 1, 2, 1)
