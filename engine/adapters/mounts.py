"""The adapters that are mounted beside one model: by name for requests, by number for rows, by slot for forwards.

A name can be given up and taken again; a number is never used twice, so what is kept under it is always of the
same weights. Runs on the engine's thread.
"""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adapters.files import AdapterFiles, factors_of, layers_for, read
from engine.adapters.layer import BASE, Factors, LowRank, low_rank_of, set_low_rank
from engine.config import is_adapter_name
from engine.errors import AdapterError, AdapterNotFound, AdapterTaken, ModelError, words_of
from engine.forward import Forward
from engine.model.memory import available_bytes, human_bytes
from engine.probe import differs

log = logging.getLogger(__name__)

MOST_ADAPTERS = 64


@dataclass(frozen=True, slots=True)
class Mounted:
    """One adapter. `num_bytes` is what its own factors take, in `num_layers` layers."""

    name: str
    folder: Path
    number: int
    rank: int
    num_layers: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_layers} layers of rank {self.rank}, {human_bytes(self.num_bytes)})"


class Adapters:
    """What is mounted beside `model`, which `forward` runs. `refusal` says why nothing can be, if that is so.

    `missing` are those that the model was loaded without, by name, and what is wrong with each.
    """

    def __init__(self, model: Any, forward: Forward, vocab_size: int, *, refusal: str = "") -> None:
        self.model = model
        self._forward = forward
        self._vocab_size = vocab_size
        self.missing: dict[str, AdapterError] = {}
        self._refusal = refusal
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Mounted] = {}
        self._slots: list[Mounted] = []  # the first is that behind BASE
        self._layers: dict[str, Any] = {}
        self._most_bytes: int | None = None

    def leave_room(self, later_bytes: int) -> None:
        """Let what is mounted from now on take so many bytes and no more: the rest is promised to rows."""
        self._most_bytes = self.num_bytes + later_bytes

    @property
    def mounted(self) -> tuple[Mounted, ...]:
        """Those that requests may choose, the oldest first."""
        return tuple(self._by_name.values())

    @property
    def num_leaving(self) -> int:
        """How many were unmounted and are in use still."""
        return len(self._slots) - len(self._by_name)

    @property
    def num_bytes(self) -> int:
        """What the factors of all take in memory."""
        low_ranks = filter(None, map(low_rank_of, self._layers.values()))
        return sum(LowRank.bytes_of(low_rank.factors) for low_rank in low_ranks)

    def number(self, name: str) -> int:
        """That of the adapter `name` of now; 0 for the model itself, which has no name. Raises AdapterNotFound."""
        if not name:
            return 0
        if name in self.missing:
            raise AdapterNotFound(f"the adapter {name} could not be mounted: {self.missing[name]}", param="model")
        if name not in self._by_name:
            listed = ", ".join(self._by_name) or "none"
            raise AdapterNotFound(f"no adapter {name!r} is mounted; mounted: {listed}", param="model")
        return self._by_name[name].number

    def slot(self, number: int) -> int:
        """Where a forward finds the adapter of this number."""
        if not number:
            return BASE
        return 1 + next(place for place, one in enumerate(self._slots) if one.number == number)

    def mount_all(self, folders: Mapping[str, Path], *, may_miss: bool = False) -> list[Mounted]:
        """Mount what belongs to the model from its load on. One that cannot be is among the `missing` where it
        `may_miss`; otherwise raises ModelError: the model is not loaded without.
        """
        mounted = []
        for name, folder in folders.items():
            try:
                mounted.append(self.mount(name, folder))
            except AdapterError as error:
                if may_miss:
                    self.missing[name] = error
                    log.warning("the model is loaded without the adapter %s: %s", name, error)
                    continue
                raise ModelError(f"adapter {name}: {error}", hint=error.hint) from error
        return mounted

    def mount(self, name: str, folder: Path) -> Mounted:
        """Let rows choose what is in `folder` as `name`. What raises leaves everything as it was.

        Raises AdapterError for an adapter of another model or kind, a name that is taken, too little memory, and a
        model that does not compute a row with it beside others as alone.
        """
        self._admit(name)
        files = read(folder)
        incoming = self._factors(files)
        own_bytes = sum(factors.num_bytes for _, factors in incoming.values())
        mounted = Mounted(name, folder, next(self._numbers), files.rank, len(incoming), own_bytes)
        kept = range(1, len(self._slots) + 1)
        before, layers = self._now(), self._layers | {layer: module for layer, (module, _) in incoming.items()}
        self._hold_room(mounted, [self._stacked(layer, kept, incoming) for layer in layers])
        try:
            after = {
                layer: LowRank(self._forward.choice, self._stacked(layer, kept, incoming)) for layer in layers
            }
        except Exception as error:  # what is wrong with a file of weights shows when they are read
            reason = words_of(error, 300)
            raise AdapterError(f"the weights in {folder} cannot be read: {reason}") from error
        slots, self._slots = self._slots, [*self._slots, mounted]
        self._set(layers, after)
        try:
            self._try(mounted, list(incoming), after)
        except Exception:
            self._slots = slots
            self._set(layers, before)
            raise
        self._layers = layers
        self._by_name[name] = mounted
        return mounted

    def unmount(self, name: str) -> Mounted | None:
        """Give the name up: no row chooses it any more. Its weights go when `settle` finds them in no use.

        None of one that was missing. Raises AdapterNotFound.
        """
        if self.missing.pop(name, None) is not None:
            return None
        self.number(name)
        return self._by_name.pop(name)

    def settle(self, in_use: Iterable[int]) -> None:
        """Let go of what was unmounted, but for the numbers that are `in_use` by rows."""
        staying = {*in_use, *(one.number for one in self._by_name.values())}
        kept = [slot for slot, one in enumerate(self._slots, 1) if one.number in staying]
        if len(kept) == len(self._slots):
            return
        after: dict[str, LowRank | None] = {}
        for layer in self._layers:
            factors = self._stacked(layer, kept, {})
            after[layer] = LowRank(self._forward.choice, factors) if any(factors) else None
        self._slots = [self._slots[slot - 1] for slot in kept]
        self._set(self._layers, after)
        self._layers = {layer: module for layer, module in self._layers.items() if after[layer] is not None}

    def _admit(self, name: str) -> None:
        if self._refusal:
            raise AdapterError(self._refusal)
        if not is_adapter_name(name):
            raise AdapterError(f"{name!r} cannot be an adapter's name: letters, digits, dots, dashes and _ can")
        if name in self._by_name or name in self.missing:
            raise AdapterTaken(f"an adapter {name} is mounted already", hint="unmount it first")
        if len(self._slots) >= MOST_ADAPTERS:
            raise AdapterError(f"{len(self._slots)} adapters are mounted, and no more may be")

    def _factors(self, files: AdapterFiles) -> dict[str, tuple[Any, Factors]]:
        """The layers that the files are for, and what is to be done to them, by name."""
        incoming: dict[str, tuple[Any, Factors]] = {}
        for layer, module, pair in layers_for(files, self.model):
            if layer in incoming:
                raise AdapterError(f"{files.folder} adapts {layer} twice")
            incoming[layer] = module, factors_of(module, pair, files.scale)
        return incoming

    def _stacked(
        self, layer: str, kept: Iterable[int], incoming: dict[str, tuple[Any, Factors]]
    ) -> list[Factors | None]:
        """The factors at `layer` by their slots to be: those of the slots `kept`, and what comes in, if any."""
        now = low_rank_of(self._layers[layer]) if layer in self._layers else None
        factors = [None, *(now.factors[slot] if now else None for slot in kept)]
        if incoming:
            factors.append(incoming[layer][1] if layer in incoming else None)
        return factors

    def _now(self) -> dict[str, LowRank | None]:
        return {layer: low_rank_of(module) for layer, module in self._layers.items()}

    def _set(self, layers: dict[str, Any], low_ranks: dict[str, LowRank | None] | dict[str, LowRank]) -> None:
        for layer, module in layers.items():
            set_low_rank(module, low_ranks.get(layer))
        self._forward.changed()

    def _hold_room(self, mounted: Mounted, stacked: Sequence[Sequence[Factors | None]]) -> None:
        needed_bytes, free_bytes = sum(map(LowRank.bytes_of, stacked)), available_bytes()
        if self._most_bytes is not None and needed_bytes > self._most_bytes:
            raise AdapterError(
                f"with {mounted.name} all adapters take {human_bytes(needed_bytes)}, and "
                f"{human_bytes(self._most_bytes)} are left for them beside what rows may take",
                hint="mount it at the start (--adapters), or bound the rows (--kv-cache-budget)",
            )
        if needed_bytes > free_bytes:
            raise AdapterError(
                f"the adapter {mounted.name} takes {human_bytes(needed_bytes)} with what is mounted beside it, "
                f"and {human_bytes(free_bytes)} of memory are free"
            )

    def _try(self, mounted: Mounted, layers: Sequence[str], low_ranks: dict[str, LowRank]) -> None:
        """Run a row with the adapter beside one without, and each alone. Raises AdapterError."""
        if reason := differs(self._forward, self._vocab_size, len(self._slots)):
            raise AdapterError(f"the adapter {mounted.name} cannot be chosen by request: {reason}")
        for layer in layers:
            if not low_ranks[layer].was_called:
                raise AdapterError(
                    f"the adapter {mounted.name} cannot be chosen by request: the model does not call {layer}"
                )
