"""What tests of a server with several models share: checkpoints, loads that can be held, and texts."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.probe import Verdict
from tests.serving import COMPLETIONS, PATIENCE_S, Gate, Served, WatchedEngine, served, settle
from tests.tiny import write_checkpoint

FAMILIES = {"tiny": "llama", "window": "gemma3_text", "hybrid": "mamba2"}
NAMES = tuple(FAMILIES)
BODY = {"prompt": "to be or not", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def write_several(root: Path) -> dict[str, Path]:
    """A tiny checkpoint of each kind, by its name."""
    families = enumerate(FAMILIES.items())
    return {name: write_checkpoint(root / name, family, seed=number) for number, (name, family) in families}


class Loads:
    """Opens engines when it may, noting which are there and on which thread they were loaded."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.live: set[str] = set()
        self.threads: set[int] = set()
        self.may = threading.Event()
        self.may.set()
        self.began = threading.Event()
        self.fault: Exception | None = None
        self.gates: dict[str, Gate] = {}
        self._verdicts: dict[str, Verdict] = {}

    def __call__(self, config: EngineConfig) -> Engine:
        name = config.model.name
        self.began.set()
        assert self.may.wait(PATIENCE_S)
        if self.fault is not None:
            raise self.fault
        self.opened.append(name)
        self.live.add(name)
        self.threads.add(threading.get_ident())
        loads = self

        class Noted(WatchedEngine):
            def close(self) -> None:
                loads.live.discard(name)
                super().close()

        engine = Noted(config, gate=self.gates.setdefault(name, Gate()), verdict=self._verdicts.get(name))
        self._verdicts[name] = engine.verdict  # as the store of verdicts keeps it for a server
        return engine

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, PATIENCE_S)


@contextmanager
def held(loads: Loads) -> Iterator[None]:
    loads.began.clear()
    loads.may.clear()
    try:
        yield
    finally:
        loads.may.set()


@asynccontextmanager
async def several(
    folders: Mapping[str, Path],
    loads: Loads | None = None,
    *,
    engine: Any = None,
    on_fault: Any = lambda fault: None,
    **server: Any,
) -> AsyncIterator[Served]:
    """A server of all `folders`, the first its default. Nothing may be live or leased at the end."""
    (_, first), *others = folders.items()
    options = {"models": tuple(name for name, _ in others), "others": tuple(others), "models_max": 2, **server}
    engine = {"on_fault": on_fault, **(engine or {})}
    async with served(first, open_engine=loads or Loads(), server=options, **engine) as service:
        yield service
        await service.exchanges_ended()
        for one in service.app.state.service.models.served:
            await asyncio.to_thread(settle, one.bridge._loop)
        assert all(place.num_leases == 0 for place in service.app.state.service.models.places)


async def wishing(service: Served, num_requests: int) -> None:
    """Wait until so many requests have no lease yet."""
    residency = service.app.state.service.models._residency
    async with asyncio.timeout(PATIENCE_S):
        while len(residency._wishes) != num_requests:
            await asyncio.sleep(0.001)


async def text(service: Served, name: str, **more: Any) -> str:
    answer = await service.answer(COMPLETIONS, {**BODY, "model": name, **more})
    assert answer["model"] == name
    said: str = answer["choices"][0]["text"]
    return said


async def alone(folders: Mapping[str, Path]) -> dict[str, str]:
    texts = {}
    for name, folder in folders.items():
        async with served(folder) as service:
            texts[name] = (await service.answer(COMPLETIONS, BODY))["choices"][0]["text"]
    assert len(set(texts.values())) == len(texts)
    return texts
