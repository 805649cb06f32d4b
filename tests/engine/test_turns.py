"""Turns on the one thread: who is next, loads among them, and what one member's end is to the others."""

import threading

import pytest

from engine.turns import MOST_PASSED, MlxThread

PATIENCE_S = 30.0


class Member:
    """Takes `num_turns` turns, noting each; `held` keeps it in its first one."""

    def __init__(self, name, taken, num_turns, urgency=0, *, begins=True, held=None):
        self.name = name
        self.taken = taken
        self.left = threading.Event()
        self.urgency = urgency
        self.is_called = True
        self.due_s = 0.0
        self._num_left = num_turns
        self._begins = begins
        self._held = held

    def begin(self):
        self.taken.append((f"{self.name} begins", threading.get_ident()))
        if self._held is not None:
            assert self._held.wait(PATIENCE_S)
        return self._begins

    def turn(self):
        self.taken.append((self.name, threading.get_ident()))
        self._num_left -= 1
        return self._num_left > 0

    def leave(self):
        self.left.set()


def run(*members, hold):
    """Let all join while the first begins, then wait until all have left; the order of turns."""
    thread = MlxThread()
    for member in members:
        thread.join(member)
    hold.set()
    for member in members:
        assert member.left.wait(PATIENCE_S)
    assert thread.wait(PATIENCE_S)
    taken = members[0].taken
    assert len({ident for _, ident in taken}) == 1
    return [name for name, _ in taken]


@pytest.fixture
def hold():
    return threading.Event()


def test_equals_take_turns(hold):
    taken = []
    members = [Member(name, taken, 3, held=hold if name == "a" else None) for name in "ab"]
    order = run(*members, hold=hold)
    assert order[:2] == ["a begins", "b begins"]
    assert order[2:] in (["a", "b"] * 3, ["b", "a"] * 3)


def test_the_urgent_go_first_and_nobody_is_passed_for_ever(hold):
    taken = []
    low = Member("low", taken, 3, urgency=2, held=hold)
    high = Member("high", taken, 20, urgency=0)
    order = run(low, high, hold=hold)
    turns = [name for name in order if "begins" not in name]
    assert turns.index("low") == MOST_PASSED
    assert turns[: 2 * (MOST_PASSED + 1)] == 2 * [*["high"] * MOST_PASSED, "low"]


def test_who_cannot_begin_leaves_and_the_others_go_on(hold):
    taken = []
    first = Member("first", taken, 2, held=hold)
    broken = Member("broken", taken, 2, begins=False)
    order = run(first, broken, hold=hold)
    assert "broken" not in order
    assert order.count("first") == 2


def test_a_thread_that_stays_takes_members_one_after_the_other():
    thread = MlxThread(stays=True)
    taken = []
    for name in "ab":
        member = Member(name, taken, 1)
        thread.join(member)
        assert member.left.wait(PATIENCE_S)
    assert len({ident for _, ident in taken}) == 1
    assert not thread.wait(0)
    thread.end()
    assert thread.wait(0)


def test_it_sleeps_until_somebody_is_called_or_due(hold):
    thread = MlxThread()
    taken = []
    member = Member("a", taken, 2, held=hold)
    thread.join(member)
    member.is_called, member.due_s = False, float("inf")
    hold.set()
    assert not member.left.wait(0.05)
    assert [name for name, _ in taken] == ["a begins"]
    with thread.wake:
        member.is_called = True
        thread.wake.notify()
    assert member.left.wait(PATIENCE_S)
    assert thread.wait(PATIENCE_S)
