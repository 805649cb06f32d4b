"""Which whole rows are kept: copies of exact prefixes, for state that cannot be cut at a block.

A snapshot serves prompts that begin with all of its tokens. Its state is opaque; the store knows its bytes alone
and keeps them within one budget: least recently used out first, those named lately last. It knows no arrays; the
clock is given.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from engine.cache.prefix import NAMED_S, UNBOUNDED_BYTES, Spare, num_same

Kind = Literal["history", "end", "cut"]
Place = tuple[Hashable, tuple[int, ...]]

SHARED = 2  # whatever so many rows have taken is kept when a longer one comes


@dataclass(slots=True)
class _Snapshot:
    kind: Kind
    state: Any
    num_bytes: int
    used_s: float
    num_taken: int = 0
    named_s: float = -inf


class Snapshots:
    """Snapshots by the key (whose they are) and all the tokens before them.

    A longer one supersedes those of its kind that it goes on from, unless several rows have gone on from them.
    Nothing is added beyond the bytes that `spare` says are free; what is dropped here is free there at once.
    """

    def __init__(
        self,
        budget_bytes: int,
        ttl_s: float = inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        spare: Spare = lambda: UNBOUNDED_BYTES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._spare = spare
        self._ttl_s = ttl_s
        self._clock = clock
        self.num_bytes = 0
        self.num_evicted = 0
        self.num_expired = 0
        self._kept: OrderedDict[Place, _Snapshot] = OrderedDict()  # least recently used first
        self._lengths: dict[Hashable, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, key: Hashable, tokens: Sequence[int], allowed: Callable[[int], bool]) -> int:
        """The length of the longest snapshot that `tokens` begin with and that is `allowed`; 0: none.

        One of all of them serves if it is of a prompt's end: what comes next is known there.
        """
        self.expire()
        lengths = sorted((n for n in self._lengths.get(key, ()) if n <= len(tokens) and allowed(n)), reverse=True)
        for n in lengths:
            snapshot = self._kept.get((key, tuple(tokens[:n])))
            if snapshot is not None and (n < len(tokens) or snapshot.kind == "end"):
                return n
        return 0

    def take(self, key: Hashable, tokens: Sequence[int], *, named: bool = False) -> Any:
        """The state behind exactly these tokens, which must be there. It stays.

        `named`: evict it after those that were not, for `NAMED_S` seconds.
        """
        snapshot = self._touched((key, tuple(tokens)), named)
        snapshot.num_taken += 1
        return snapshot.state

    def insert(
        self,
        key: Hashable,
        tokens: Sequence[int],
        kind: Kind,
        num_bytes: int,
        copy: Callable[[], Any],
        *,
        named: bool = False,
    ) -> bool:
        """Keep what `copy` gives, `num_bytes` of it, unless it is there or never fits; whether it was added.

        What a prompt ends with takes the place of what is kept there otherwise. `copy` is called after cold
        snapshots have made room. `named` is that of `take`.
        """
        self.expire()
        place = (key, tuple(tokens))
        there = self._kept.get(place)
        if there is not None and (there.kind == "end" or kind != "end"):
            self._touched(place, named)
            return False
        if num_bytes > min(self.budget_bytes, self.num_bytes + self._spare()):
            return False
        if there is not None:
            self._drop(place)
        for n in [n for n in self._lengths.get(key, ()) if n < len(place[1])]:
            parent = self._kept.get((key, place[1][:n]))
            if parent is not None and parent.kind == kind and parent.num_taken < SHARED:
                self._drop((key, place[1][:n]))
        while num_bytes > min(self.budget_bytes - self.num_bytes, self._spare()):
            self._evict_one()
        self._kept[place] = _Snapshot(kind, copy(), num_bytes, self._clock())
        self._touched(place, named)
        self._lengths.setdefault(key, Counter())[len(place[1])] += 1
        self.num_bytes += num_bytes
        return True

    def divergence(self, key: Hashable, tokens: Sequence[int]) -> int | None:
        """Index of the first token that differs from what is kept and goes on; None where nothing differs.

        None as well where not even the first token is the same.
        """
        asked, same, goes_on = tuple(tokens), 0, False
        for owner, kept in self._kept:
            if owner == key and kept[:same] == asked[:same]:
                here = num_same(asked, kept)
                goes_on = len(kept) > here or (goes_on and here == same)
                same = here
        return same if goes_on and 0 < same < len(asked) else None

    def expire(self) -> None:
        """Drop what was not used for too long."""
        before_s = self._clock() - self._ttl_s
        while self._kept and next(iter(self._kept.values())).used_s < before_s:
            self._drop(next(iter(self._kept)))
            self.num_expired += 1

    def evict(self, num_bytes: int) -> int:
        """Drop cold snapshots until so many bytes are free, or none is left; the bytes that this freed."""
        before = self.num_bytes
        while self._kept and before - self.num_bytes < num_bytes:
            self._evict_one()
        return before - self.num_bytes

    def expires_in_s(self) -> float:
        """How long until `expire` has something to drop if nothing is used until then; infinite where never."""
        coldest = next(iter(self._kept.values()), None)
        return inf if coldest is None else max(0.0, coldest.used_s + self._ttl_s - self._clock())

    def clear(self) -> int:
        """Drop everything; the bytes that this freed."""
        freed = self.num_bytes
        for place in list(self._kept):
            self._drop(place)
        return freed

    def check(self) -> None:
        """Bytes and lengths are those of what is kept, within the budget."""
        assert self.num_bytes == sum(snapshot.num_bytes for snapshot in self._kept.values()), "bytes are lost"
        assert self.num_bytes <= self.budget_bytes, "the budget is exceeded"
        lengths: dict[Hashable, Counter[int]] = {}
        for key, tokens in self._kept:
            lengths.setdefault(key, Counter())[len(tokens)] += 1
        assert lengths == self._lengths, "the lengths are not those of what is kept"
        used = [snapshot.used_s for snapshot in self._kept.values()]
        assert used == sorted(used), "what was used last is not the last to go"

    def _evict_one(self) -> None:
        self._drop(self._first_out())
        self.num_evicted += 1

    def _touched(self, place: Place, named: bool) -> _Snapshot:
        snapshot, now_s = self._kept[place], self._clock()
        snapshot.used_s = now_s
        snapshot.named_s = now_s if named else snapshot.named_s
        self._kept.move_to_end(place)
        return snapshot

    def _first_out(self) -> Place:
        """What makes room first: the coldest of those that nobody has named lately, else the coldest."""
        since_s = self._clock() - NAMED_S
        unnamed = (place for place, snapshot in self._kept.items() if snapshot.named_s < since_s)
        return next(unnamed, None) or next(iter(self._kept))

    def _drop(self, place: Place) -> None:
        key, tokens = place
        self.num_bytes -= self._kept.pop(place).num_bytes
        self._lengths[key][len(tokens)] -= 1
        if not self._lengths[key][len(tokens)]:
            del self._lengths[key][len(tokens)]
        if not self._lengths[key]:
            del self._lengths[key]
