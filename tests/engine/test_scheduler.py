"""The scheduler's choices, without a model."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.ledger import Ledger, SharedContext, tokens_ahead
from engine.errors import StepFailed
from engine.plan import PrefillPlan
from engine.request import PRIORITIES, Failed, Output, Progress, Request, Row
from engine.scheduler import RISE_TICKS, Scheduler
from engine.speculate.drafts import PromptLookup
from engine.speculate.governor import Costs, Governor
from engine.speculate.lookup import KINDS


def row(num_tokens, name="r", priority="normal"):
    return Row(Request(name, (1,) * num_tokens, priority=priority), 10, 0, None)


def scheduler(size=16, mixed=0, **options):
    return Scheduler(PrefillPlan(fixed_tokens=size, mixed_tokens=mixed), **{"num_slots": 4, **options})


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


@pytest.mark.parametrize("mixed", [0, 32])
@pytest.mark.parametrize("interval", [1, 4, 16])
def test_a_parked_prompt_is_granted_a_piece_every_interval(interval, mixed):
    sched = scheduler(grant_interval=interval, mixed=mixed)
    decoding(sched)
    long = row(16 * 5)
    sched.add(long)
    ticks = 0
    while not long.prefilled:
        play(sched, sched.tick())
        ticks += 1
    assert ticks == 5 if mixed else 4 * (interval + 1) <= ticks <= 5 * (interval + 1)


@pytest.mark.parametrize("mixed", [0, 32])
@pytest.mark.parametrize("interval", [1, 2, 3, 16])
def test_a_short_prompt_passes_a_parked_long_one(interval, mixed):
    sched = scheduler(grant_interval=interval, mixed=mixed)
    decoding(sched)
    long, short = row(160), row(4)
    sched.add(long)
    play(sched, sched.tick())
    play(sched, sched.tick())
    sched.add(short)
    for _ in range(5):
        play(sched, sched.tick())
    assert short.prefilled
    assert not long.prefilled


@pytest.mark.parametrize("interval", [3, 4, 16])
def test_a_flood_of_short_prompts_does_not_hold_up_a_parked_one(interval):
    sched = scheduler(grant_interval=interval, num_slots=8)
    decoding(sched)
    long = row(16 * 9)
    sched.add(long)
    num_finished = 0
    for _ in range(9 * (interval + 1)):
        sched.add(row(16))
        play(sched, sched.tick())
        for one in [one for one in sched.decoding if len(one.request.prompt) == 16]:
            sched.remove(one)
            num_finished += 1
    assert long.prefilled
    assert num_finished >= 9 * (interval + 1) // 2 - 9


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("mixed", [0, 32])
def test_more_prompts_than_the_interval_has_room_for_take_turns(interval, mixed):
    sched = scheduler(grant_interval=interval, num_slots=7, mixed=mixed)
    decoding(sched)
    longs = [row(16 * 40) for _ in range(6)]
    for long in longs:
        sched.add(long)
    granted_at = {long: [] for long in longs}
    for tick in range(240):
        for piece in play(sched, sched.tick()).prefill:
            granted_at[piece.row].append(tick)
    for ticks in granted_at.values():
        assert max(b - a for a, b in itertools.pairwise([0, *ticks, 240])) <= 2 * len(longs) + 1


class Life:
    """A scheduler whose rows come, run and end as drawn, and what each of them met."""

    def __init__(self, data, sched, num_ticks, lengths):
        self.sched = sched
        self.met = {}  # row: ticks since it has its slot, and those that gave it a piece while others decoded
        chances = st.tuples(st.booleans(), st.sampled_from(lengths), st.integers(0, 3))
        for arrives, length, ends in data.draw(st.lists(chances, min_size=num_ticks, max_size=num_ticks)):
            if arrives:
                sched.add(row(length))
            self.tick(ends)

    def tick(self, ends):
        others_decode = bool(self.sched.decoding)
        tick = self.sched.tick()
        for one in self.sched.prefilling:
            self.met.setdefault(one, (0, []))
        for one in self.sched.prefilling:
            ticks, pieces = self.met[one]
            granted = others_decode and any(piece.row is one for piece in tick.prefill)
            self.met[one] = ticks + 1, pieces + [ticks] * granted
        play(self.sched, tick)
        if ends == 0 and tick.decode:
            self.sched.settle([Output(tick.decode[0], 5, "", "stop")])


@given(data=st.data(), interval=st.integers(3, 8), mixed=st.sampled_from([0, 20]))
def test_a_prompt_of_c_pieces_has_its_first_token_within_c_windows(data, interval, mixed):
    """Whatever else comes, runs and ends, in as many slots as a window has room for."""
    sched = scheduler(grant_interval=interval, num_slots=(interval + 1) // 2, mixed=mixed)
    life = Life(data, sched, 150, [1, 15, 16, 17, 40, 100, 300])
    for one, (ticks, _) in life.met.items():
        num_pieces = -(-len(one.request.prompt) // 16)
        assert ticks <= num_pieces * (interval + 1)


@given(data=st.data(), interval=st.integers(1, 8), num_slots=st.integers(2, 8))
def test_a_prompt_puts_one_piece_into_a_window_of_those_that_decode(data, interval, num_slots):
    life = Life(data, scheduler(grant_interval=interval, num_slots=num_slots), 100, [1, 16, 40, 300])
    for _, pieces in life.met.values():
        assert all(b - a >= 2 for a, b in itertools.pairwise(pieces))
        if num_slots <= (interval + 1) // 2:
            windows = [ticks // (interval + 1) for ticks in pieces]
            assert len(windows) == len(set(windows))


@given(data=st.data(), budget=st.integers(1, 40))
def test_a_mixed_tick_is_within_its_budget_and_every_stream_gets_its_token(data, budget):
    sched = scheduler(size=32, mixed=budget, num_slots=6)
    num_decoding = data.draw(st.integers(1, 5))
    decoding(sched, num_decoding)
    for length in data.draw(st.lists(st.integers(1, 200), min_size=1)):
        sched.add(row(length))
    while sched.prefilling or sched.waiting:
        running = list(sched.decoding)
        tick = play(sched, sched.tick())
        assert list(tick.decode) == running
        assert 0 < tick.prefill_tokens <= max(min(budget - len(running), 32), 16)
        for one in sched.decoding.copy():
            if one not in running:
                sched.remove(one)


def test_where_cuts_change_bits_nothing_is_mixed():
    plan = PrefillPlan(on_grid=True, mixed_tokens=64)
    sched = Scheduler(plan, num_slots=4)
    decoding(sched)
    sched.add(row(600))
    assert not any(tick.prefill and tick.decode for tick in (play(sched, sched.tick()) for _ in range(60)))


def test_a_mixed_tick_holds_no_more_rows_than_a_batch():
    sched = scheduler(mixed=64, max_batch_size=2)
    rows = decoding(sched, 3)
    sched.add(row(100))
    ticks = [play(sched, sched.tick()) for _ in range(3)]
    assert all(len(tick.decode) == 2 and tick.prefill for tick in ticks)
    assert {one for tick in ticks for one in tick.decode} == {*rows}


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
        mixed = chance.choice([0, 1, 30])
        sched = scheduler(num_slots=chance.randint(1, 4), grant_interval=chance.randint(1, 5), mixed=mixed)
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


def ledger(num_tokens, **options):
    """Memory for so many tokens, counted one by one."""
    return Ledger(num_tokens, lambda n: n, **options)


class Machine:
    """Does to rows what loop and engine do: stores, draws, preempts. Every row gets the tokens 0, 1, 2, …"""

    def __init__(self, memory, *, lookahead=False, **options):
        self.sched = scheduler(**{"size": 8, "num_slots": 3, "memory": memory, **options})
        self.lookahead = lookahead
        self.stored = {}
        self.said = {}
        self.ended = []
        self.unread = ()

    def add(self, one):
        self.said[one] = []
        self.sched.add(one)

    def cancel(self, one):
        one.finish_reason = "cancelled"
        self.sched.remove(one)

    def step(self):
        tick = self.sched.tick()
        events = self.read() if tick.preempt or not self.lookahead or tick.prefill else []
        for one in tick.preempt:
            if one.finish_reason is None:
                one.start_over()
                self.stored[one] = 0
        for piece in tick.prefill:
            assert self.stored.get(piece.row, 0) == piece.start == piece.row.cursor
            piece.row.cursor = self.stored[piece.row] = piece.stop
            assert piece.stop <= tokens_ahead(piece.row)
        flying = [piece.row for piece in tick.prefill if piece.is_last]
        for one in tick.decode:
            if one.finish_reason is None and len(one.output) + (one in self.unread) < one.limit_tokens:
                self.stored[one] += 1
                assert self.stored[one] <= tokens_ahead(one), "a token is stored for which nothing is set aside"
                flying.append(one)
        events += self.read()
        self.unread = tuple(flying)
        if tick.prefill or not self.lookahead:
            events += self.read()
        self.sched.settle(events)
        self.sched.check()
        return tick

    def read(self):
        events = []
        for one in self.unread:
            if one.finish_reason is None:
                one.output.append(len(one.output))
                self.said[one].append(one.output[-1])
                one.finish_reason = "length" if len(one.output) == one.limit_tokens else None
                self.ended += [one] * (one.finish_reason is not None)
                events.append(Output(one, one.output[-1], "", one.finish_reason))
        self.unread = ()
        return events

    def run(self, most_ticks=5000):
        """To the end, which must come."""
        for _ in range(most_ticks):
            if not self.sched.has_work:
                break
            assert self.step(), "rows wait and nothing runs"
        assert not self.sched.has_work
        for one in self.ended:
            assert self.said[one] == [*range(one.limit_tokens)]


def asked(num_tokens, num_new, priority="normal"):
    return Row(Request("r", (1,) * num_tokens, priority=priority), num_new, 0, None)


def test_a_row_waits_until_there_is_memory_and_nobody_passes_it():
    machine = Machine(ledger(40))
    first, large, small = asked(20, 5), asked(30, 5), asked(2, 5)
    for one in (first, large, small):
        machine.add(one)
    machine.step()
    assert machine.sched.waiting == [large, small]
    machine.run()
    assert {*machine.ended} == {first, large, small}
    assert not any(one.num_preempted for one in (first, large, small))


@pytest.mark.parametrize("lookahead", [False, True])
def test_who_cannot_grow_takes_the_place_of_who_has_come_least_far(lookahead):
    machine = Machine(ledger(40), lookahead=lookahead)
    old, young = asked(8, 20), asked(8, 20)
    machine.add(old)
    for _ in range(4):
        machine.step()
    machine.add(young)
    machine.run()
    assert (old.num_preempted, young.num_preempted) == (0, 1)
    assert machine.ended == [old, young]


def test_among_equals_the_latest_gives_way():
    machine = Machine(ledger(40), size=16)
    rows = [asked(8, 12) for _ in range(3)]
    for one in rows:
        machine.add(one)
    machine.run()
    assert [one.num_preempted > 0 for one in rows] == [False, False, True]


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_row_alone_in_memory_ends_where_it_cannot_grow(lookahead):
    machine = Machine(ledger(20), lookahead=lookahead)
    one = asked(10, 100)
    machine.add(one)
    machine.run()
    assert len(one.output) in (9, 10)
    assert one.finish_reason == "length"
    assert one.num_preempted == 0


def test_a_preempted_row_keeps_its_age():
    machine = Machine(ledger(40), num_slots=2, size=16)
    first, second, third = asked(8, 20), asked(8, 20), asked(8, 20)
    for one in (first, second, third):
        machine.add(one)
    while not second.num_preempted:
        machine.step()
    assert machine.sched.waiting == [third, second]
    machine.run()
    assert machine.ended == [first, second, third]


def test_a_preempted_row_can_be_cancelled_while_it_waits():
    machine = Machine(ledger(40), size=16)
    first, second = asked(8, 20), asked(8, 20)
    machine.add(first)
    machine.add(second)
    while not second.num_preempted:
        machine.step()
    machine.cancel(second)
    machine.run()
    assert machine.ended == [first]


def test_higher_priority_takes_a_running_rows_place_only_when_asked_for():
    for preempts in (False, True):
        machine = Machine(ledger(1000), num_slots=1, preempts=preempts)
        low, high = asked(8, 30, "low"), asked(8, 5, "high")
        machine.add(low)
        for _ in range(5):
            machine.step()
        machine.add(high)
        machine.run()
        assert machine.ended == ([high, low] if preempts else [low, high])
        assert low.num_preempted == preempts


def test_the_lowest_gives_way_first_and_equals_do_not():
    machine = Machine(ledger(60), preempts=True)
    normal, low, high = asked(20, 9), asked(20, 9, "low"), asked(20, 9, "high")
    for one in (normal, low):
        machine.add(one)
    for _ in range(8):
        machine.step()
    machine.add(high)
    machine.add(asked(20, 9))
    machine.step()
    assert (normal.num_preempted, low.num_preempted) == (0, 1)
    machine.run()


def test_who_has_risen_by_waiting_is_not_preempted_again():
    """A flood of high priorities takes a low row's place until it has waited for its turn, and then no more."""
    machine = Machine(ledger(1000), num_slots=1, preempts=True)
    low = asked(4, 20, "low")
    machine.add(low)
    for _ in range(3 * RISE_TICKS):
        if not any(one.request.priority == "high" for one in machine.sched.rows):
            machine.add(asked(4, 2, "high"))
        machine.step()
        if low in machine.ended:
            return
    pytest.fail("a low row was preempted for ever")


@pytest.mark.parametrize("num_tokens", [12, 13, 17, 30])
@pytest.mark.parametrize("lookahead", [False, True])
def test_memory_far_too_small_for_its_rows_never_stops_them(num_tokens, lookahead):
    machine = Machine(ledger(num_tokens), lookahead=lookahead, num_slots=4)
    rows = [asked(1 + number % 10, 1 + number % 7) for number in range(30)]
    for one in rows:
        machine.add(one)
    machine.run()
    assert {*machine.ended} == {*rows}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 25), st.sampled_from(PRIORITIES)),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("cache"), st.integers(1, 40)),
    ),
    max_size=60,
)


class Cache:
    """As much of a prompt cache as the ledger asks for: entries of 8 bytes."""

    def __init__(self):
        self.num_bytes = 0

    def evict(self, num_bytes):
        freed = min(-(-num_bytes // 8) * 8, self.num_bytes)
        self.num_bytes -= freed
        return freed


@settings(max_examples=150, deadline=None)
@given(
    STEPS,
    st.integers(33, 90),
    st.sampled_from([0, 40, 64]),
    st.sampled_from([1, 8]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_the_books_are_straight_and_everybody_ends(
    steps, budget, context, step_tokens, lookahead, preempts
):
    cache = Cache()
    memory = Ledger(
        -(-budget // step_tokens) * step_tokens,
        lambda n: -(-n // step_tokens) * step_tokens,
        watermark=0.1,
        held=lambda: cache.num_bytes,
        evict=cache.evict,
    )
    shared = SharedContext(max(context, 33), memory, watermark=0.1) if context else memory
    machine = Machine(shared, lookahead=lookahead, preempts=preempts)
    for name, *values in steps:
        match name:
            case "add":
                num_tokens, num_new, priority = values
                machine.add(asked(num_tokens, num_new, priority))
            case "step":
                for _ in range(values[0]):
                    machine.step()
            case "cancel":
                rows = machine.sched.rows
                if values[0] < len(rows):
                    machine.cancel(rows[values[0]])
            case "cache":
                cache.num_bytes += min(values[0], memory.spare_bytes()) // 8 * 8
        machine.sched.check()
    machine.run()
    cache.evict(1000)
    assert memory.spare_bytes() == memory.budget_bytes


def drafting(**options):
    """A scheduler whose rows all say what they said before, where a step costs the same however wide it is."""
    costs = Costs({1: 1.0, 64: 1.0})
    governor = Governor(costs, costs, guesses=[guess for _, guess in KINDS])
    return scheduler(drafts=PromptLookup(governor, block_size=7, max_rows=4), **options)


def test_every_row_gets_a_token_in_each_step_and_those_that_draft_take_turns():
    """However much the others draft, a step is wider by one block at most, and there is no second one for them."""
    sched = drafting()
    rows = [Row(Request(name, tuple(b"abcabcabc")), 100, 0, None) for name in "xyz"]
    plain = Row(Request("plain", tuple(b"12345")), 100, 0, None)
    for one in (*rows, plain):
        sched.add(one)
    while len(sched.decoding) < 4:
        play(sched, sched.tick())
    first = []
    for _ in range(9):
        tick = sched.tick()
        assert set(tick.decode) == {*rows, plain}
        assert sum(draft.num_tokens for draft in tick.drafts) <= 7
        assert plain not in [draft.row for draft in tick.drafts]
        first.append(tick.drafts[0].row.request.id)
        play(sched, tick)
    assert sorted(first) == sorted("xyz" * 3)
    assert len(set(first[:3])) == 3


def test_a_step_that_takes_pieces_verifies_nothing():
    sched = drafting(mixed=64)
    one = Row(Request("one", tuple(b"abcabcabc")), 100, 0, None)
    sched.add(one)
    while not sched.decoding:
        play(sched, sched.tick())
    assert sched.tick().drafts
    sched.add(row(40))
    tick = sched.tick()
    assert tick.prefill
    assert tick.decode == (one,)
    assert not tick.drafts


def test_drafts_that_do_not_fit_are_left_out():
    budget = Ledger(13, lambda num_tokens: num_tokens)
    sched = drafting(memory=budget)
    one = Row(Request("one", tuple(b"abcabcabc")), 100, 0, None)
    sched.add(one)
    while not sched.decoding:
        play(sched, sched.tick())
    tick = sched.tick()
    assert tick.decode == (one,)
    assert not tick.drafts
    assert one.num_drafted == 0
    assert sched.slots[0] is one
