"""Which of a server's models are in memory: who is loaded next, who makes room, and which requests wait meanwhile.

A request has a lease of its model for as long as it runs, and a model that is leased is never unloaded. Who waits
for a model that is not there is served by priority, among equals in the order of arrival, one load at a time.
Where it has no room the model that was not used for longest makes it; where all are leased, the one that was
leased longest ago is leased to nobody who came later, until it is free. So whoever waits has to wait for what
runs already, and for nothing that comes. A model that has just been loaded is leased to all who waited for it.

Plain values and a clock that is given; the models themselves are loaded and unloaded by `models.py`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.request import PRIORITIES, Priority

State = Literal["unloaded", "loading", "loaded", "unloading"]
LEAST_BYTES = 16 << 20  # for rows and prompt cache; with less room than that another model goes first


@dataclass(eq=False, slots=True)
class Place:
    """One model. `weight_bytes` are an estimate until it was loaded; `claim_bytes` are what it may take while it
    is there, rows and prompt cache included. `fault` says why it could not be loaded when that was tried last.
    """

    name: str
    weight_bytes: int
    is_pinned: bool = False
    state: State = "unloaded"
    claim_bytes: int = 0
    num_slots: int = 0
    num_leases: int = 0
    num_loads: int = 0
    is_new: bool = False
    leased_s: float = -math.inf
    used_s: float = -math.inf
    fault: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether it may be unloaded now."""
        return self.state == "loaded" and not (self.is_pinned or self.num_leases)


@dataclass(eq=False, slots=True)
class Wish:
    """A request that waits for a lease; `rank` orders them."""

    place: Place
    rank: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model; rows and prompt cache may take `cache_bytes`, None: what is configured."""

    place: Place
    cache_bytes: int | None


@dataclass(frozen=True, slots=True)
class Unload:
    place: Place


class Residency:
    """Decides. At most `most` models are there at once, with `most_bytes` together (None: unbounded); after
    `ttl_s` without a lease one is unloaded, 0: never.
    """

    def __init__(
        self, places: Sequence[Place], *, most: int, most_bytes: int | None = None, ttl_s: float = 0.0
    ) -> None:
        self.places = places
        self._most = most
        self._most_bytes = most_bytes
        self._ttl_s = ttl_s
        self._wishes: list[Wish] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Requests that have no lease, or a lease and no slot."""
        return len(self._wishes) + sum(max(place.num_leases - place.num_slots, 0) for place in self.places)

    def can_begin(self, place: Place) -> bool:
        """Whether a request for it would run at once."""
        return place.state == "loaded" and place.num_leases < place.num_slots and place is not self._making_room()

    def lacks(self, place: Place) -> str | None:
        """Why the model could not be loaded even if all that may go had gone, or None."""
        if self._most_bytes is None:
            return None
        held = sum(one.claim_bytes for one in self.places if one.is_pinned and one is not place)
        needed = place.weight_bytes + LEAST_BYTES
        if held + needed <= self._most_bytes:
            return None
        return f"{place.name} needs {needed} bytes, and {max(self._most_bytes - held, 0)} are there for it"

    def wish(self, place: Place, priority: Priority) -> Wish:
        """A request comes; `grants` tells when it has its lease."""
        wish = Wish(place, (PRIORITIES.index(priority), next(self._numbers)))
        self._wishes.append(wish)
        return wish

    def withdraw(self, wish: Wish) -> None:
        """The request has left before it had its lease; harmless afterwards."""
        if wish in self._wishes:
            self._wishes.remove(wish)

    def grants(self, now_s: float) -> Iterator[Wish]:
        """Those that have their lease from now on."""
        for wish in sorted(self._wishes, key=lambda wish: wish.rank):
            place = wish.place
            if place.state == "loaded" and not (place is self._making_room() and wish.rank > self._first().rank):
                self._wishes.remove(wish)
                place.num_leases += 1
                place.leased_s = place.used_s = now_s
                yield wish
        for place in self.places:
            place.is_new = False

    def give_back(self, place: Place, now_s: float) -> None:
        """A lease has ended."""
        place.num_leases -= 1
        place.used_s = now_s

    def next(self, now_s: float) -> Load | Unload | None:
        """What is to be done now; it is under way when this returns."""
        if any(place.state in ("loading", "unloading") for place in self.places):
            return None
        wanted = self._wanted()
        if wanted is not None and self._fits(wanted):
            return self._load(wanted)
        goes = self._making_room() if wanted is not None else self._too_much() or self._expired(now_s)
        if goes is None or not goes.is_idle:
            return None
        goes.state = "unloading"
        return Unload(goes)

    def expires_s(self) -> float:
        """When the first idle model has been so for too long."""
        idle = [place.used_s for place in self.places if place.is_idle] if self._ttl_s else []
        return min(idle, default=math.inf) + self._ttl_s

    def loaded(self, place: Place, *, cache_bytes: int | None, num_slots: int, now_s: float) -> None:
        """The model is there, and its `weight_bytes` are known."""
        place.state, place.fault = "loaded", ""
        place.claim_bytes = place.weight_bytes + (cache_bytes or 0)
        place.num_slots = num_slots
        place.num_loads += 1
        place.is_new = True
        place.used_s = now_s

    def unloaded(self, place: Place, fault: str = "") -> list[Wish]:
        """The model has gone or could not come; with a `fault` those that waited for it do so in vain."""
        place.state, place.fault, place.claim_bytes, place.num_slots = "unloaded", fault, 0, 0
        in_vain = [wish for wish in self._wishes if wish.place is place] if fault else []
        self._wishes = [wish for wish in self._wishes if wish not in in_vain]
        return in_vain

    def _too_much(self) -> Place | None:
        """Who goes where a model has turned out larger than its files had said."""
        if self._most_bytes is None or self._claimed <= self._most_bytes:
            return None
        return min((place for place in self.places if place.is_idle), key=lambda place: place.used_s, default=None)

    def _expired(self, now_s: float) -> Place | None:
        idle = [place for place in self.places if place.is_idle and now_s - place.used_s >= self._ttl_s]
        return min(idle, key=lambda place: place.used_s, default=None) if self._ttl_s else None

    def _first(self) -> Wish:
        """The first of those whose model is not there."""
        return min((wish for wish in self._wishes if wish.place.state != "loaded"), key=lambda wish: wish.rank)

    def _wanted(self) -> Place | None:
        absent = any(wish.place.state != "loaded" for wish in self._wishes)
        return self._first().place if absent else None

    def _making_room(self) -> Place | None:
        """The model that is leased to no latecomers, since another has no room."""
        wanted = self._wanted()
        if wanted is None or wanted.state != "unloaded" or self._fits(wanted):
            return None
        if any(place.state == "unloading" for place in self.places):
            return None
        may = [one for one in self.places if one.state == "loaded" and not (one.is_pinned or one.is_new)]
        idle = [place for place in may if place.is_idle]
        if idle:
            return min(idle, key=lambda place: place.used_s)
        return min(may, key=lambda place: place.leased_s, default=None)

    @property
    def _resident(self) -> list[Place]:
        return [place for place in self.places if place.state != "unloaded"]

    def _fits(self, place: Place) -> bool:
        if len(self._resident) >= self._most:
            return False
        if self._most_bytes is None:
            return True
        return self._claimed + place.weight_bytes + LEAST_BYTES <= self._most_bytes

    @property
    def _claimed(self) -> int:
        return sum(place.claim_bytes for place in self._resident)

    def _load(self, place: Place) -> Load:
        """With an even share of what is left for rows, one for each model that may still come."""
        share = None
        if self._most_bytes is not None:
            left = self._most_bytes - self._claimed - place.weight_bytes
            share = left // (self._most - len(self._resident))
        place.state = "loading"
        place.claim_bytes = place.weight_bytes + (share or 0)
        return Load(place, share)
