"""What the engine does, told to whoever watches: snapshots of its numbers, and each request's stages as they come.

While nobody watches nothing is computed, here or in the engine. A watcher that does not read keeps the last
snapshot and a bounded number of stages, and hears how many it has missed. No text of prompts or answers is in it.
Knows no HTTP.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.served import Slot
from engine.watch import Moment
from server.bridge import Bridge

SNAPSHOT_S = 0.25
MAX_HELD = 512  # stages, for one watcher

Frame = dict[str, Any]


class Watcher:
    """One who watches. Iteration ends when the feed does."""

    def __init__(self, snapshot: Frame) -> None:
        self._stages: deque[Frame] = deque()
        self._snapshot: Frame | None = snapshot
        self._num_missed = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._changed.set()

    def tell(self, stages: Sequence[Frame]) -> None:
        """More stages; the oldest make room."""
        self._stages.extend(stages)
        while len(self._stages) > MAX_HELD:
            self._stages.popleft()
            self._num_missed += 1
        self._changed.set()

    def show(self, snapshot: Frame) -> None:
        """The numbers now, in place of those that were not read."""
        self._snapshot = snapshot
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (frame := self._next()) is not None:
                yield frame
            if self._ended:
                return

    def _next(self) -> Frame | None:
        if self._num_missed:
            missed, self._num_missed = self._num_missed, 0
            return {"type": "missed", "num_stages": missed}
        if self._stages:
            return self._stages.popleft()
        snapshot, self._snapshot = self._snapshot, None
        return snapshot


class Feed:
    """All who watch one engine. It looks at the numbers every `every_s` seconds while there are any."""

    def __init__(self, bridge: Bridge, every_s: float = SNAPSHOT_S) -> None:
        self._bridge = bridge
        self._every_s = every_s
        self._watchers: list[Watcher] = []
        self._looking: asyncio.Task[None] | None = None

    def watch(self) -> Watcher:
        """One more watcher, who begins with the numbers of now; `leave` gives it back."""
        now = snapshot(self._bridge)
        watcher = Watcher(now)
        self._watchers.append(watcher)
        if self._looking is None:
            self._bridge.listen(self._hear)
            self._looking = asyncio.get_running_loop().create_task(self._look(now))
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It watches no more; harmless when repeated."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and self._looking is not None:
            self._bridge.listen(None)
            self._looking.cancel()
            self._looking = None

    def end(self) -> None:
        """There is nothing more to be seen."""
        for watcher in tuple(self._watchers):
            watcher.end()
            self.leave(watcher)

    def _hear(self, moments: Sequence[Moment]) -> None:
        if self._watchers:
            stages = [_stage(moment) for moment in moments]
            for watcher in self._watchers:
                watcher.tell(stages)

    async def _look(self, shown: Frame) -> None:
        """A snapshot for all whenever it differs from the last in more than its time."""
        while True:
            await asyncio.sleep(self._every_s)
            now = snapshot(self._bridge)
            if now | {"at_s": 0} != shown | {"at_s": 0}:
                shown = now
                for watcher in self._watchers:
                    watcher.show(now)


def snapshot(bridge: Bridge) -> Frame:
    """The numbers that change while requests run; `/metrics` has all of them."""
    numbers = bridge.numbers()
    cache = numbers.prompt_cache
    return {
        "type": "snapshot",
        "at_s": numbers.at_s,
        "slots": [_slot(slot) for slot in bridge.slots()],
        "queue_depth": numbers.queue_depth,
        "requests": {str(outcome): count for outcome, count in numbers.requests.items()},
        "prompt_tokens": numbers.prompt_tokens + numbers.recomputed_tokens,
        "completion_tokens": numbers.completion_tokens,
        "preemptions": numbers.preemptions,
        "kv_blocks": numbers.kv_blocks,
        "kv_bytes": numbers.kv_bytes,
        "prompt_cache": {
            "enabled": cache.enabled,
            "hits": cache.hits,
            "misses": cache.misses,
            "tokens_reused": cache.tokens_reused,
            "bytes": cache.num_bytes,
            "budget_bytes": cache.budget_bytes,
        },
        "drafts": {"proposed": numbers.drafts.proposed, "accepted": numbers.drafts.accepted},
    }


def _slot(slot: Slot | None) -> Frame | None:
    if slot is None:
        return None
    return {
        "task": slot.task,
        "id": slot.request.id,
        "choice": slot.request.choice,
        "prompt_tokens": len(slot.request.prompt),
        "stored_tokens": slot.stored_tokens,
        "cached_tokens": slot.cached_tokens,
        "new_tokens": slot.decoded_tokens,
    }


def _stage(moment: Moment) -> Frame:
    """As it goes over the wire: the stage is the frame's type, and an outcome is there at the end alone."""
    frame = {"type": moment.stage, **dataclasses.asdict(moment)}
    del frame["stage"]
    if moment.outcome is None:
        del frame["outcome"]
    return frame
