"""The scheduler's choices, without a model."""

import itertools
import random

import pytest

from engine.errors import StepFailed
from engine.plan import PrefillPlan
from engine.request import PRIORITIES, Failed, Output, Progress, Request, Row
from engine.scheduler import RISE_TICKS, Scheduler


def row(num_tokens, name="r", priority="normal"):
    return Row(Request(name, (1,) * num_tokens, priority=priority), 10, 0, None)


def scheduler(size=16, **options):
    return Scheduler(PrefillPlan(fixed_tokens=size), **{"num_slots": 4, **options})


def play(sched, tick):
    """Do to the rows what the engine would, and settle."""
    events = []
    for piece in tick.prefill:
        piece.row.cursor = piece.stop
        events.append(Progress(piece.row, piece.stop, len(piece.row.request.prompt)))
    sched.settle(events)
    sched.check()
    return tick


def decoding(sched, count=1):
    rows = [row(1) for _ in range(count)]
    for one in rows:
        sched.add(one)
    while len(sched.decoding) < count:
        play(sched, sched.tick())
    return rows


def test_an_idle_scheduler_has_nothing_to_do():
    assert not scheduler().tick()


def test_rows_beyond_the_slots_wait():
    sched = scheduler(num_slots=2)
    for _ in range(3):
        sched.add(row(4))
    play(sched, sched.tick())
    assert (len(sched.decoding), len(sched.waiting)) == (2, 1)


def test_a_freed_slot_goes_to_the_first_in_the_queue():
    sched = scheduler(num_slots=1)
    (first,) = decoding(sched)
    second, third = row(2), row(2)
    sched.add(second)
    sched.add(third)
    sched.settle([Output(first, 5, "", "stop")])
    assert [piece.row for piece in play(sched, sched.tick()).prefill] == [second]


def served_in_turn(sched, running):
    """End the one running row again and again; the names of the rows that get its slot."""
    names = []
    while sched.waiting:
        sched.settle([Output(running, 5, "", "stop")])
        while not sched.decoding:
            play(sched, sched.tick())
        (running,) = sched.decoding
        names.append(running.request.id)
    return names


@pytest.mark.parametrize("arrivals", [*itertools.permutations(PRIORITIES)])
def test_a_freed_slot_goes_to_the_highest_priority_and_among_equals_to_the_first(arrivals):
    sched = scheduler(num_slots=1)
    (running,) = decoding(sched)
    for number in range(2):
        for priority in arrivals:
            sched.add(row(1, f"{priority} {number}", priority))
    assert served_in_turn(sched, running) == [f"{p} {number}" for p in PRIORITIES for number in range(2)]


@pytest.mark.parametrize(("waits", "passed_by"), [(0, 4), (1, 2), (2, 0)])
def test_whoever_waits_rises(waits, passed_by):
    sched = scheduler(num_slots=1)
    (running,) = decoding(sched)
    sched.add(row(1, "old", "low"))
    for _ in range(waits * RISE_TICKS):
        play(sched, sched.tick())
    for name in ("high", "normal", "low"):
        for number in range(2):
            sched.add(row(1, f"{name} {number}", name))
    assert served_in_turn(sched, running).index("old") == passed_by


@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_flood_of_high_priorities_starves_nobody(priority):
    """The slot is free in every tick or two, and there is always a fresh row of high priority that wants it."""
    sched = scheduler(num_slots=1)
    patient = row(1, "patient", priority)
    sched.add(row(1, "flood", "high"))
    sched.add(patient)
    bound = 2 * PRIORITIES.index(priority) * RISE_TICKS + 10
    for _ in range(bound):
        sched.add(row(1, "flood", "high"))
        tick = play(sched, sched.tick())
        sched.settle([Output(one, 5, "", "stop") for one in tick.rows])
        if patient in tick.rows:
            return
    pytest.fail(f"{priority} never ran in {bound} ticks")


def test_a_decode_tick_lies_between_two_prefill_ticks():
    sched = scheduler()
    decoding(sched)
    for _ in range(3):
        sched.add(row(16))
    kinds = [bool(play(sched, sched.tick()).prefill) for _ in range(6)]
    assert not any(a and b for a, b in itertools.pairwise(kinds))


@pytest.mark.parametrize("interval", [1, 4, 16])
def test_a_parked_prompt_is_granted_a_piece_every_interval(interval):
    sched = scheduler(grant_interval=interval)
    decoding(sched)
    long = row(16 * 5)
    sched.add(long)
    ticks = 0
    while not long.prefilled:
        play(sched, sched.tick())
        ticks += 1
    assert ticks <= 5 * (interval + 1)
    assert ticks >= 4 * (interval + 1)


def test_a_short_prompt_passes_a_parked_long_one():
    sched = scheduler(grant_interval=16)
    decoding(sched)
    long, short = row(160), row(4)
    sched.add(long)
    play(sched, sched.tick())
    play(sched, sched.tick())
    sched.add(short)
    for _ in range(3):
        play(sched, sched.tick())
    assert short.prefilled
    assert not long.prefilled


def test_a_flood_of_short_prompts_does_not_starve_a_long_one():
    sched = scheduler(grant_interval=4, num_slots=8)
    decoding(sched)
    long = row(64)
    sched.add(long)
    for _ in range(4 * 5 + 4):
        short = row(16)
        sched.add(short)
        play(sched, sched.tick())
        if short in sched.decoding:
            sched.remove(short)
    assert long.prefilled


def test_more_rows_than_a_batch_take_turns():
    sched = scheduler(num_slots=5, max_batch_size=2)
    rows = decoding(sched, 5)
    seen = [one for _ in range(5) for one in play(sched, sched.tick()).decode]
    assert all(seen.count(one) == 2 for one in rows)


def test_failed_and_removed_rows_are_forgotten():
    sched = scheduler()
    first, second = decoding(sched, 2)
    sched.settle([Failed(first, StepFailed("x"))])
    sched.remove(second)
    sched.remove(second)
    assert not sched.has_work


def test_random_lives_keep_the_books_straight():
    chance = random.Random(7)
    for _ in range(30):
        sched = scheduler(num_slots=chance.randint(1, 4), grant_interval=chance.randint(1, 5))
        pending = [row(chance.randint(1, 80), priority=chance.choice(PRIORITIES)) for _ in range(12)]
        for _ in range(600):
            if pending and chance.random() < 0.2:
                sched.add(pending.pop())
            tick = play(sched, sched.tick())
            ended = [Output(one, 1, "", "stop") for one in tick.decode if chance.random() < 0.1]
            sched.settle(ended)
            if sched.rows and chance.random() < 0.02:
                sched.remove(chance.choice(sched.rows))
            sched.check()
        assert not sched.has_work
