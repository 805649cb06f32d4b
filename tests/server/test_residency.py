"""Which models are in memory: bounds always hold, who is leased stays, and whoever waits has a turn."""

import math
import random

import pytest

from server.residency import LEAST_BYTES, Load, Place, Residency, Unload

MB = 1 << 20


def residency(*sizes: int, most: int = 2, most_bytes: int | None = None, pinned: str = "", ttl_s: float = 0.0):
    places = [Place(name, size, is_pinned=name in pinned) for name, size in zip("abcdef", sizes, strict=False)]
    return Residency(places, most=most, most_bytes=most_bytes, ttl_s=ttl_s), places


def load(one: Residency, place: Place, now_s: float = 0.0) -> Load:
    """Have the load that is due, of `place`, done."""
    action = one.next(now_s)
    assert isinstance(action, Load)
    assert action.place is place
    assert one.next(now_s) is None, "one load at a time"
    one.loaded(place, cache_bytes=action.cache_bytes, num_slots=4, now_s=now_s)
    return action


def unload(one: Residency, place: Place, now_s: float = 0.0) -> None:
    action = one.next(now_s)
    assert isinstance(action, Unload)
    assert action.place is place
    assert one.next(now_s) is None
    one.unloaded(place)


def granted(one: Residency, now_s: float = 0.0) -> list[str]:
    return [wish.place.name for wish in one.grants(now_s)]


def test_two_requests_have_one_load() -> None:
    one, (a, _) = residency(1, 1)
    one.wish(a, "normal")
    one.wish(a, "normal")
    assert granted(one) == []
    load(one, a)
    assert granted(one) == ["a", "a"]
    assert a.num_leases == 2
    assert one.next(0) is None


def test_the_model_unused_for_longest_makes_room() -> None:
    one, (a, b, c) = residency(1, 1, 1)
    for now_s, place in enumerate((a, b, a)):
        one.wish(place, "normal")
        if place.state == "unloaded":
            load(one, place, now_s)
        granted(one, now_s)
        one.give_back(place, now_s)
    one.wish(c, "normal")
    unload(one, b)
    load(one, c)
    assert granted(one) == ["c"]
    assert {place.name for place in (a, b, c) if place.state == "loaded"} == {"a", "c"}


def test_who_waits_for_room_waits_for_what_runs_and_not_for_what_comes() -> None:
    one, (a, b) = residency(1, 1, most=1)
    one.wish(a, "normal")
    load(one, a)
    granted(one)
    one.wish(b, "normal")
    assert one.next(0) is None, "a is leased"
    one.wish(a, "normal")
    assert granted(one) == [], "who came after b waits"
    assert not one.can_begin(a)
    one.give_back(a, 1)
    unload(one, a)
    load(one, b)
    assert granted(one) == ["b"]
    one.give_back(b, 2)
    unload(one, b)
    load(one, a)
    assert granted(one) == ["a"]


def test_a_latecomer_does_not_keep_an_idle_model_that_makes_room() -> None:
    one, (a, b) = residency(1, 1, most=1)
    one.wish(a, "normal")
    load(one, a)
    granted(one)
    one.wish(b, "normal")
    one.wish(a, "normal")
    one.give_back(a, 1)
    assert granted(one) == []
    unload(one, a)


def test_the_more_urgent_pass() -> None:
    one, (a, b, c) = residency(1, 1, 1, most=1)
    one.wish(a, "normal")
    load(one, a)
    granted(one)
    one.wish(b, "low")
    one.wish(a, "high")
    assert granted(one) == ["a"], "before the low one, whose model has no room yet"
    one.wish(c, "normal")
    for _ in range(2):
        one.give_back(a, 1)
    unload(one, a)
    load(one, c)


def test_who_leaves_holds_nobody_up() -> None:
    one, (a, b) = residency(1, 1, most=1)
    one.wish(a, "normal")
    load(one, a)
    granted(one)
    gone = one.wish(b, "normal")
    one.wish(a, "normal")
    assert granted(one) == []
    one.withdraw(gone)
    one.withdraw(gone)
    assert granted(one) == ["a"]


def test_bytes_are_shared_evenly_and_bound_what_is_there() -> None:
    one, (a, b, c) = residency(100 * MB, 200 * MB, 650 * MB, most=3, most_bytes=1000 * MB)
    one.wish(a, "normal")
    assert load(one, a).cache_bytes == 300 * MB
    assert granted(one) == ["a"]
    one.wish(b, "normal")
    assert load(one, b).cache_bytes == (1000 - 400 - 200) // 2 * MB
    granted(one)
    one.give_back(b, 1)
    one.wish(c, "normal")
    unload(one, b)
    assert one.next(1) is None, "a has a lease, and beside what it may take c has no room"
    one.give_back(a, 1)
    unload(one, a)
    assert load(one, c).cache_bytes == 350 * MB // 3


def test_a_model_that_is_larger_than_its_files_makes_others_go() -> None:
    one, (a, b) = residency(300 * MB, 300 * MB, most_bytes=1000 * MB)
    for now_s, place in enumerate((a, b)):
        one.wish(place, "normal")
        action = one.next(now_s)
        assert isinstance(action, Load)
        place.weight_bytes += 200 * MB * now_s
        one.loaded(place, cache_bytes=action.cache_bytes, num_slots=4, now_s=now_s)
        assert granted(one, now_s) == [place.name]
        one.give_back(place, now_s)
    unload(one, a, 2)
    assert one.next(3) is None


def test_what_can_never_fit_is_said() -> None:
    one, (a, b) = residency(100 * MB, 800 * MB, most_bytes=900 * MB, pinned="a")
    assert one.lacks(a) is None
    one.wish(a, "normal")
    load(one, a)
    assert "b needs" in (one.lacks(b) or "")
    assert residency(800 * MB, most_bytes=800 * MB + LEAST_BYTES)[0].lacks(Place("x", 800 * MB)) is None


def test_pinned_models_stay_and_idle_ones_go_after_their_time() -> None:
    one, (a, b) = residency(1, 1, pinned="a", ttl_s=10)
    for place in (a, b):
        one.wish(place, "normal")
        load(one, place)
        granted(one)
    assert one.expires_s() == math.inf
    one.give_back(a, 5)
    one.give_back(b, 7)
    assert one.expires_s() == 17
    assert one.next(16.9) is None
    unload(one, b, 17)
    assert one.next(1000) is None
    assert a.state == "loaded"


def test_a_load_that_fails_ends_those_that_waited_for_it_alone() -> None:
    one, (a, b) = residency(1, 1, most=1)
    wishes = [one.wish(a, "normal"), one.wish(b, "normal"), one.wish(a, "normal")]
    assert isinstance(one.next(0), Load)
    assert one.unloaded(a, "broken") == [wishes[0], wishes[2]]
    assert a.fault == "broken"
    load(one, b)
    assert granted(one) == ["b"]


@pytest.mark.parametrize("seed", range(20))
def test_everybody_has_a_lease_in_the_end(seed: int) -> None:
    """Random requests over more models than there is room for: the bounds hold, and none is forgotten."""
    chance = random.Random(seed)
    most, most_bytes = chance.randint(1, 3), chance.choice([None, 500 * MB])
    one, places = residency(*(chance.randint(1, 300) * MB for _ in range(5)), most=most, most_bytes=most_bytes)
    under_way: Load | Unload | None = None
    running: list[Place] = []
    num_wished = num_granted = 0
    for now_s in range(3000):
        if num_wished < 300 and chance.random() < 0.5:
            one.wish(chance.choice(places), chance.choice(["high", "normal", "low"]))
            num_wished += 1
        if running and chance.random() < 0.4:
            one.give_back(running.pop(chance.randrange(len(running))), now_s)
        if isinstance(under_way, Load) and chance.random() < 0.5:
            place = under_way.place
            one.loaded(place, cache_bytes=under_way.cache_bytes, num_slots=2, now_s=now_s)
            under_way = None
        elif isinstance(under_way, Unload) and chance.random() < 0.5:
            assert one.unloaded(under_way.place) == []
            under_way = None
        for wish in one.grants(now_s):
            assert wish.place.state == "loaded"
            running.append(wish.place)
            num_granted += 1
        if (action := one.next(now_s)) is not None:
            assert under_way is None
            under_way = action
            if isinstance(action, Unload):
                assert action.place not in running
        there = [place for place in places if place.state != "unloaded"]
        assert len(there) <= most
        assert most_bytes is None or sum(place.claim_bytes for place in there) <= most_bytes
        assert {place.name: place.num_leases for place in places} == {
            place.name: running.count(place) for place in places
        }
    assert num_granted == num_wished == 300
    assert one.num_waiting == 0
