"""Which whole rows are kept: copies of exact prefixes, for state that cannot be cut at a block.

A snapshot serves prompts that begin with all of its tokens. Its state is opaque; the store knows its bytes alone,
keeps them within one budget, least recently used out first, and knows no arrays. The clock is given.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.cache.prefix import UNBOUNDED_BYTES, Spare

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


class Snapshots:
    """Snapshots by the key (whose they are) and all the tokens before them.

    A longer one supersedes those of its kind that it goes on from, unless several rows have gone on from them.
    Nothing is added beyond the bytes that `spare` says are free; what is dropped here is free there at once.
    """

    def __init__(
        self,
        budget_bytes: int,
        ttl_s: float = float("inf"),
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
        """The length of the longest snapshot that `tokens` begin with and that is `allowed`; 0: none."""
        self.expire()
        lengths = sorted(self._lengths.get(key, ()), reverse=True)
        return next(
            (n for n in lengths if n <= len(tokens) and allowed(n) and (key, tuple(tokens[:n])) in self._kept), 0
        )

    def take(self, key: Hashable, tokens: Sequence[int]) -> Any:
        """The state behind exactly these tokens, which must be there. It stays."""
        place = (key, tuple(tokens))
        snapshot = self._kept[place]
        snapshot.num_taken += 1
        snapshot.used_s = self._clock()
        self._kept.move_to_end(place)
        return snapshot.state

    def insert(
        self, key: Hashable, tokens: Sequence[int], kind: Kind, num_bytes: int, copy: Callable[[], Any]
    ) -> bool:
        """Keep what `copy` gives, `num_bytes` of it, unless it is there or never fits; whether it was added.

        `copy` is called after cold snapshots have made room.
        """
        self.expire()
        place = (key, tuple(tokens))
        if place in self._kept:
            self._kept[place].used_s = self._clock()
            self._kept.move_to_end(place)
            return False
        if num_bytes > min(self.budget_bytes, self.num_bytes + self._spare()):
            return False
        for n in [n for n in self._lengths.get(key, ()) if n < len(place[1])]:
            parent = self._kept.get((key, place[1][:n]))
            if parent is not None and parent.kind == kind and parent.num_taken < SHARED:
                self._drop((key, place[1][:n]))
        while num_bytes > min(self.budget_bytes - self.num_bytes, self._spare()):
            self._evict_one()
        self._kept[place] = _Snapshot(kind, copy(), num_bytes, self._clock())
        self._lengths.setdefault(key, Counter())[len(place[1])] += 1
        self.num_bytes += num_bytes
        return True

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
        self._drop(next(iter(self._kept)))
        self.num_evicted += 1

    def _drop(self, place: Place) -> None:
        key, tokens = place
        self.num_bytes -= self._kept.pop(place).num_bytes
        self._lengths[key][len(tokens)] -= 1
        if not self._lengths[key][len(tokens)]:
            del self._lengths[key][len(tokens)]
        if not self._lengths[key]:
            del self._lengths[key]
