"""The models of one server: found by name, leased to requests, loaded and unloaded as `residency.py` decides.

All of it runs on the event loop; the models' engines take turns on one thread. Where a server has one model it is
there from start to end, and a lease of it is nothing.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import Receive

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineStopped, MlxcelError, ModelError, QueueFull
from engine.metrics import Numbers
from engine.model.memory import available_bytes, human_bytes
from engine.model.store import weight_file_bytes
from engine.request import Priority
from engine.size import Bound, Size
from engine.turns import MlxThread
from server.bridge import Bridge
from server.config import ServerConfig
from server.conversations import Conversations
from server.errors import UnknownModel
from server.feed import Feed
from server.residency import Load, Place, Residency, Unload, Wish
from server.sse import unless_gone
from server.validate import MAX_ECHOED

log = logging.getLogger(__name__)

MEMORY_HINT = "see --models-memory"
SHARE = 0.9  # of what is free at the start, where nobody says how much the models may take


def engines_of(config: ServerConfig) -> dict[str, EngineConfig]:
    """The engine of each model, by its name."""
    others = {name: replace(config.engine, model=path, adapters=()) for name, path in config.others}
    return {config.served_name: config.engine, **others}


def residency_of(config: ServerConfig) -> Residency:
    """Who decides for several models. Raises ConfigError where none of them has room."""
    asked = config.models_memory
    most_bytes = int(SHARE * available_bytes()) if asked == "auto" else asked.num_bytes
    places = [
        Place(name, weight_file_bytes(engine.model), is_pinned=name in config.models_pin)
        for name, engine in engines_of(config).items()
    ]
    most = min(config.models_max, len(places))
    residency = Residency(places, most=most, most_bytes=most_bytes, ttl_s=config.models_ttl)
    lacking = [residency.lacks(place) for place in places]
    if all(lacking):
        raise ConfigError("models_memory", f"models_memory has room for no model: {lacking[0]}")
    return residency


class Served:
    """One model as routes see it: its name in answers, all its `names`, its engine, and what outlives a turn.

    With an `adapter` it is `base` with that, run by the same engine; `adapted` are those of a base by the names of
    their adapters.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        names: Sequence[str],
        bridge: Bridge,
        *,
        adapter: str = "",
        base: "Served | None" = None,
    ) -> None:
        self.name = names[0]
        self.names = names
        self.engine = engine
        self.bridge = bridge
        self.adapter = adapter
        self.base: Served = base or self
        self.adapted: dict[str, Served] = {}
        self.feed: Feed = Feed(bridge) if base is None else base.feed
        self.conversations = Conversations(
            bridge,
            self.name,
            adapter=adapter,
            keeps=not engine.no_prompt_cache,
            warms_up=not config.no_warmup_next_turn,
        )


def _names_with_adapters(base: Served) -> list[str]:
    return [one.name for one in base.adapted.values()]


async def _unmount(one: Served) -> None:
    with contextlib.suppress(MlxcelError):  # the model goes, could not be loaded, or was without it
        await one.bridge.unmount(one.adapter)


class Lease:
    """One request's hold on a model that is loaded; harmless to release more than once."""

    def __init__(self, give_back: Callable[[], None] = lambda: None) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Models:
    """The models that `config` names. `on_fault` hears of an engine that is gone for good, where it is the only
    one or was to be there from the start; `loop_options` reach every `Bridge`.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        on_fault: Callable[[MlxcelError], None],
        clock: Callable[[], float] = time.perf_counter,
        **loop_options: Any,
    ) -> None:
        self._config = config
        self._on_fault = on_fault
        self._clock = loop_options["clock"] = clock
        self._waiting: dict[Wish, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._thread: MlxThread | None = None
        self._residency: Residency | None = None
        engines = engines_of(config)
        if config.others:
            self._thread = MlxThread(stays=True)
            loop_options["thread"] = self._thread
            self._residency = residency_of(config)
        self.served = [self._made(name, engine, loop_options) for name, engine in engines.items()]
        self._by_name = {name: one for one in reversed(self.served) for name in one.names}
        self._places = dict(zip(self.served, self._residency.places, strict=True)) if self._residency else {}

    def _made(self, name: str, engine: EngineConfig, loop_options: Mapping[str, Any]) -> Served:
        own = (name, self._config.model_id) if name == self._config.served_name else (name,)
        bridge = Bridge(
            engine,
            on_fault=lambda fault: self._failed(served, fault),
            on_loaded=lambda: self._loaded(served),
            name=name.replace("%", "%%") if self.are_several else "",
            **loop_options,
        )
        served = Served(self._config, engine, tuple(dict.fromkeys(own)), bridge)
        for adapter in engine.mounts:
            self._adapt(served, adapter)
        return served

    def _adapt(self, base: Served, adapter: str) -> Served:
        names = [f"{name}:{adapter}" for name in base.names]
        one = Served(self._config, base.engine, names, base.bridge, adapter=adapter, base=base)
        base.adapted[adapter] = one
        return one

    def keep_adapter(self, base: Served, adapter: str, folder: Path) -> Served:
        """Have requests choose the adapter, which is mounted, and have it mounted whenever the model is loaded."""
        base.engine = replace(base.engine, adapters=(*base.engine.adapters, f"{adapter}={folder}"))
        return self._adapt(base, adapter)

    async def drop_adapter(self, one: Served) -> None:
        """Have no request choose it from now on, whoever waits for that. A model that is being loaded with it
        gives it up when it is there.
        """
        base, place = one.base, self.place(one)
        del base.adapted[one.adapter]
        kept = (f"{name}={folder}" for name, folder in base.engine.mounts.items() if name != one.adapter)
        base.engine = replace(base.engine, adapters=tuple(kept))
        one.conversations.close()
        if place is None or place.state in ("loading", "loaded"):
            unmounting = self._spawn(_unmount(one))
            if one.bridge.model_now is not None:
                await asyncio.shield(unmounting)

    @property
    def default(self) -> Served:
        """What a request gets that names no model."""
        return self.served[0]

    @property
    def each(self) -> list[Served]:
        """All that a request can choose: every model, and it with each of its adapters."""
        return [one for base in self.served for one in (base, *base.adapted.values())]

    @property
    def are_several(self) -> bool:
        return self._residency is not None

    def find(self, asked: str) -> Served:
        """The model of this name, with the adapter behind its colon if it has one, or the default one where none
        is named. An adapter that one model alone has may be named alone. Raises UnknownModel.
        """
        if not asked:
            return self.default
        having = [one] if (one := self._by_name.get(asked)) is not None else self._adapted(asked)
        if len(having) > 1:
            listed = ", ".join(one.name for one in having)
            raise UnknownModel(
                f"several models have an adapter {asked}; one of them is meant by: {listed}", param="model"
            )
        if not having:
            listed = ", ".join(name for one in self.served for name in (*one.names, *_names_with_adapters(one)))
            raise UnknownModel(
                f"the model {asked[:MAX_ECHOED]!r} is not served here; served: {listed}", param="model"
            )
        return having[0]

    def _adapted(self, asked: str) -> list[Served]:
        """The models with the adapter that is named so, with its model's name before it or without."""
        model, _, adapter = asked.rpartition(":")
        if (base := self._by_name.get(model)) is not None and adapter in base.adapted:
            return [base.adapted[adapter]]
        return [one.adapted[asked] for one in self.served if asked in one.adapted]

    def place(self, served: Served) -> Place | None:
        """Where it stands among several, or None: it is the only one."""
        return self._places.get(served.base)

    def start(self) -> None:
        """Load what is to be there from the start; called on the event loop."""
        if self._residency is None:
            self.default.bridge.start()
            return
        for place in self._residency.places:
            if place.is_pinned:
                self._spawn(self._preload(place))

    @property
    def is_loading(self) -> bool:
        """Whether something that is to be there from the start is not."""
        if self._residency is None:
            return self.default.bridge.model_now is None
        return any(place.is_pinned and place.state != "loaded" for place in self._residency.places)

    @property
    def fault(self) -> MlxcelError | None:
        """What ended the only engine."""
        return self.default.bridge.fault if self._residency is None else None

    def numbers(self) -> dict[str, Numbers]:
        """What was counted of each model, by its name; the only one has none."""
        return {one.name if self.are_several else "": one.bridge.numbers() for one in self.served}

    @property
    def places(self) -> Sequence[Place]:
        """Where each of several models stands."""
        return () if self._residency is None else self._residency.places

    def silent_s(self) -> float:
        """How long work has been in flight without a token or a stored piece; 0 when there is none, and while a
        load holds all of it up.
        """
        if any(place.state == "loading" for place in self.places):
            return 0.0
        return max(one.bridge.silent_s() for one in self.served)

    async def lease(self, served: Served, priority: Priority = "normal") -> Lease:
        """Wait until the model is there, and keep it there. Raises QueueFull, and what kept it from loading."""
        if self._residency is None:
            return Lease()
        place = self._places[served.base]
        try:
            self._check(place)
        except QueueFull:
            served.bridge.refused()
            raise
        await self._granted(place, priority)
        return Lease(lambda: self._given_back(place))

    @contextlib.asynccontextmanager
    async def leased(self, served: Served, receive: Receive) -> AsyncIterator[None]:
        """The model is there within. Raises ClientGone for one that leaves before that, and as `lease` does."""
        lease = await unless_gone(receive, self.lease(served))
        try:
            yield
        finally:
            lease.release()

    def end_watching(self) -> None:
        """There is nothing more to be seen."""
        for served in self.served:
            served.feed.end()

    def end(self) -> None:
        """End everything that runs or waits; each request hears EngineStopped."""
        self._is_ending = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineStopped("the server is stopping"))
        for served in self.served:
            served.bridge.end()

    async def stop(self) -> None:
        """End everything and wait until all engines have stopped."""
        self.end_watching()
        self.end()
        if self._timer is not None:
            self._timer.cancel()
        for one in self.each:
            one.conversations.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(served.bridge.close() for served in self.served))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.end)

    def _check(self, place: Place) -> None:
        """Raise what keeps a request for it from waiting."""
        residency = self._decides
        if self._is_ending:
            raise EngineStopped("the server is stopping")
        if lacking := residency.lacks(place):
            raise ModelError(f"the model cannot be loaded: {lacking}", hint=MEMORY_HINT)
        if residency.num_waiting >= self._config.engine.max_queue_depth and not residency.can_begin(place):
            raise QueueFull(
                f"{residency.num_waiting} requests wait already, and no more may "
                f"(max_queue_depth {self._config.engine.max_queue_depth})"
            )

    async def _granted(self, place: Place, priority: Priority) -> None:
        """Wait for a lease of it. A request that leaves meanwhile leaves nothing behind."""
        wish = self._decides.wish(place, priority)
        granted = self._waiting[wish] = asyncio.get_running_loop().create_future()
        self._advance()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._given_back(place)
            raise
        finally:
            self._waiting.pop(wish, None)
            self._decides.withdraw(wish)
            self._advance()

    def _given_back(self, place: Place) -> None:
        self._decides.give_back(place, self._clock())
        self._advance()

    def _advance(self) -> None:
        """Grant, load and unload what can be now."""
        if self._is_ending:
            return
        residency = self._decides
        for wish in residency.grants(self._clock()):
            if not (waiting := self._waiting[wish]).done():
                waiting.set_result(None)
            else:  # it has just been cancelled
                residency.give_back(wish.place, self._clock())
        match residency.next(self._clock()):
            case Load(place=place, cache_bytes=cache_bytes):
                self._load(place, cache_bytes)
            case Unload(place=place):
                log.info("unloading %s", place.name)
                self._spawn(self._unload(place))
        self._set_timer()

    def _load(self, place: Place, cache_bytes: int | None) -> None:
        served = self._served(place)
        engine, num_parts = served.engine, min(self._config.models_max, len(self.served))
        asked = engine.kv_cache_budget
        if asked.num_bytes is not None:
            cache_bytes = asked.num_bytes // num_parts
        budget = asked if cache_bytes is None or asked == "none" else Bound(cache_bytes)
        beside = "" if cache_bytes is None else f", with {human_bytes(cache_bytes)} for rows and prompt cache"
        log.info("loading %s%s", place.name, beside)
        kept = Size(engine.prompt_cache_bytes // num_parts)
        served.bridge.start(
            replace(engine, kv_cache_budget=budget, prompt_cache_bytes=kept, adapters_may_miss=True)
        )

    def _loaded(self, served: Served) -> None:
        place = self._places.get(served)
        model = served.bridge.model_now
        if place is None or model is None or place.state != "loading":
            return
        place.weight_bytes = model.storable.weight_bytes
        if lacking := self._decides.lacks(place):  # its files had said less
            self._failed(served, ModelError(f"the model cannot be kept: {lacking}", hint=MEMORY_HINT))
            return
        self._decides.loaded(
            place,
            cache_bytes=model.storable.budget_bytes,
            num_slots=model.num_slots,
            now_s=self._clock(),
        )
        self._advance()

    def _failed(self, served: Served, fault: MlxcelError) -> None:
        """An engine is gone, or could not be loaded: of several models this one, until somebody asks again."""
        place = self._places.get(served)
        if place is None:
            self._on_fault(fault)
        elif place.state in ("loading", "loaded"):
            log.error("%s: %s", place.name, fault)
            comes_back = place.is_pinned and place.state == "loaded"
            place.state = "unloading"
            self._spawn(self._unload(place, fault, comes_back=comes_back))

    async def _unload(self, place: Place, fault: MlxcelError | None = None, *, comes_back: bool = False) -> None:
        await self._served(place).bridge.stop()
        for wish in self._decides.unloaded(place, "" if fault is None else str(fault)):
            if not (waiting := self._waiting[wish]).done() and fault is not None:
                waiting.set_exception(fault)
        if comes_back and not self._is_ending:
            self._spawn(self._preload(place))
        self._advance()

    async def _preload(self, place: Place) -> None:
        try:
            await self._granted(place, "high")
        except MlxcelError as fault:
            self._on_fault(fault)
            return
        self._given_back(place)

    def _set_timer(self) -> None:
        """Look again when a model has been idle for too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expires_s = self._decides.expires_s()
        if math.isfinite(expires_s):
            in_s = max(expires_s - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(in_s, self._advance)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def _decides(self) -> Residency:
        assert self._residency is not None, "one model needs no decisions"
        return self._residency

    def _served(self, place: Place) -> Served:
        return next(served for served, its in self._places.items() if its is place)
