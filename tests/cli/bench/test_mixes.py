"""What conversations of a mix share, and that a seed settles them."""

import pytest

from mlxcel_cli.bench.mixes import Mix, conversations


@pytest.mark.parametrize("mix", Mix)
def test_a_seed_settles_every_text(mix):
    assert conversations(mix, 9, "a") == conversations(mix, 9, "a")
    assert conversations(mix, 9, "a") != conversations(mix, 9, "b")


@pytest.mark.parametrize("mix", Mix)
def test_there_are_as_many_requests_as_asked_for(mix):
    assert sum(len(one.turns) for one in conversations(mix, 10, "a")) == 10


def test_chats_share_nothing():
    assert len({one.system for one in conversations(Mix.CHAT, 20, "a")}) == 20


def test_a_shared_prefix_is_shared_and_long():
    made = conversations(Mix.SHARED_PREFIX, 5, "a", 100)
    assert len({one.system for one in made}) == 1
    assert len(made[0].system.split()) == 101
    assert len({one.turns for one in made}) == 5


def test_every_fourth_prompt_is_long():
    lengths = [len(one.turns[0].split()) > 50 for one in conversations(Mix.LONG_PROMPT, 8, "a", 50)]
    assert lengths == [False, False, False, True] * 2
