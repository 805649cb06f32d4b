"""A store with two bounds, on entries and on bytes, out of which the least recently used go first."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """For one thread. `num_bytes` is what its entries were said to take."""

    def __init__(self, *, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep `value`, in the place of what had its key; not at all where it alone is too large."""
        self.drop(key)
        if num_bytes > self._max_bytes:
            return
        self._kept[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes or len(self._kept) > self._max_entries:
            self.drop(next(iter(self._kept)))

    def get(self, key: K) -> V | None:
        """What is kept by `key`, which is now the last to go."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def drop(self, key: K) -> bool:
        """Whether there was anything."""
        _, num_bytes = self._kept.pop(key, (None, -1))
        self.num_bytes -= max(num_bytes, 0)
        return num_bytes >= 0
