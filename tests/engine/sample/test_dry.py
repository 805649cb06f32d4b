"""DRY against its definition, read off every pair of places in the tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, Row, Sampling
from engine.sample.dry import dry_penalties
from engine.sample.state import SamplerState, draw_of

BREAKERS = {9: ((),), 7: ((8,), (8, 6))}  # the token 9, and the texts 7 8 and 7 8 6


def reference(tokens, sampling, breakers):
    """For every token: the longest end of `tokens` that was followed by it before, without a breaker inside."""
    reach = len(tokens)
    for at in range(len(tokens) - 1, -1, -1):
        ends = [
            at + 1 + len(tail)
            for tail in breakers.get(tokens[at], ())
            if (tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail)
        ]
        if ends:
            reach = len(tokens) - max(ends)
            break
    longest = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        length = min(length, reach)
        if length >= sampling.dry_allowed_length:
            longest[tokens[end]] = max(longest.get(tokens[end], 0), length)
    if len(tokens) <= sampling.dry_allowed_length or reach < sampling.dry_allowed_length:
        return {}
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
        for token, length in longest.items()
        if () not in breakers.get(token, ())
    }


@given(
    tokens=st.lists(st.integers(0, 3) | st.integers(6, 9), max_size=40),
    allowed=st.integers(0, 4),
    base=st.sampled_from([1.0, 1.75, 3.0]),
)
def test_penalties_are_their_definition(tokens, allowed, base):
    sampling = Sampling(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed)
    for breakers in ({}, BREAKERS):
        seen = dry_penalties(tokens, sampling, breakers)
        expected = reference(tokens, sampling, breakers)
        assert seen.keys() == expected.keys()
        assert all(np.isclose(seen[token], expected[token], rtol=1e-9) for token in seen)


def test_the_longer_the_repetition_the_more():
    sampling = Sampling(dry_multiplier=1.0)
    assert dry_penalties([1, 2, 3, 4, 5, 1, 2], sampling, {}) == {3: 1.0}
    assert dry_penalties([1, 2, 3, 4, 5, 1, 2, 3], sampling, {}) == {4: 1.75}
    assert dry_penalties([1, 2, 3, 4, 5, 1], sampling, {}) == {}


def test_nothing_reaches_over_a_breaker_and_none_is_penalized():
    sampling = Sampling(dry_multiplier=1.0, dry_allowed_length=1)
    assert dry_penalties([1, 2, 9, 3, 1, 2], sampling, BREAKERS) == {}
    assert dry_penalties([5, 9, 2, 3, 5, 9, 2], sampling, BREAKERS) == {3: 1.0}
    assert dry_penalties([5, 7, 8, 2, 3, 5, 7, 8, 2], sampling, BREAKERS) == {3: 1.0}


@pytest.mark.parametrize("base", [1.0, 1.0001, 1.75, 100.0])
def test_endless_repetitions_stay_within_float32(base):
    sampling = Sampling(dry_multiplier=100.0, dry_base=base)
    [penalty] = dry_penalties([5] * 3000, sampling, {}).values()
    assert np.isfinite(np.float32(penalty))


def test_the_window_is_over_prompt_and_output():
    def drawn(last_n):
        sampling = Sampling(dry_multiplier=1.0, dry_penalty_last_n=last_n)
        state = SamplerState.of(sampling)
        request = Request("r", (1, 2, 3, 4), sampling)
        return draw_of(Row(request, 10, 0, None, sampler=state, output=[1, 2])).dry

    assert drawn(-1) == drawn(6) == drawn(64) == {3: 1.0}
    assert drawn(5) == drawn(0) == {}
