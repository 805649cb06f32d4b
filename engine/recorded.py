"""Decode steps, recorded once for each number of tokens and run again as one call of the compiled kernels.

A step of as many tokens builds the same graph every time, whichever rows they are of, and MLX hands each of its
operations over by itself. A recording calls the unmodified model once with ids and positions that nobody knows
yet; what it builds is kept as a list of tasks (`engine/native/src/program.cpp`). Positions, ids and the rows'
storage are its inputs, so nothing of the step it was made in stays in it but which tokens have which adapter:
steps with adapters have recordings of their own. The first steps are held against plain ones bit for bit.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.adapters.layer import BASE, Choice
from engine.cache.attend import Batch, Place, RecordedLayer
from engine.cache.kinds import LayerKind
from engine.cache.pages import PagedLayer, PagedStorage
from engine.cache.rows import DenseLayer, DenseStorage
from engine.cache.views import view_of
from engine.kernels import native

log = logging.getLogger(__name__)

NUM_CHECKED = 2
# Steps of one layout of adapters before it is recorded, which costs about as much as they lose, and how many
# layouts are counted.
PLAIN_FIRST, MOST_COUNTED = 4, 1024
MOST_ADAPTED = 64  # recordings of steps with adapters; of more the one unused for longest is forgotten

Rows = Sequence[DenseStorage | PagedStorage]
Key = tuple[int, tuple[int, ...]]  # tokens, and the slots of their adapters where some have one


class RecordedSteps:
    """The recorded decode steps of one model. `reason` says why there are none any more, once that is so."""

    def __init__(self, model: Any, kinds: Sequence[LayerKind], choice: Choice) -> None:
        self._model = model
        self._kinds = kinds
        self._choice = choice
        self._recordings: OrderedDict[Key, native.Recording] = OrderedDict()
        self._num_checked: Counter[Key] = Counter()
        self._num_plain: Counter[Key] = Counter()
        self.reason: str | None = None

    def logits(
        self,
        steps: Sequence[Sequence[int]],
        rows: Rows,
        plain: Callable[[], mx.array],
        *,
        adapters: Sequence[int],
    ) -> mx.array:
        """Logits `[tokens, vocab]` after each of the rows' next tokens `steps`, which are stored.

        `plain` gives the same unrecorded, and is not evaluated. `adapters` are the slots of all tokens.
        """
        counts = [len(step) for step in steps]
        num_tokens = sum(counts)
        if self.reason is not None:
            return plain()
        key = _key(adapters)
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(num_tokens, adapters)
            except Exception as fault:  # noqa: BLE001 - a model's own code may raise anything, and does without values
                return self._give_up(f"a step cannot be recorded: {fault}", plain)
        ids = [token for step in steps for token in step]
        logits = self._recordings[key].run(ids, *_places(rows, counts))
        self._touch(key)
        if self._num_checked[key] < NUM_CHECKED:
            self._num_checked[key] += 1
            expected = plain()
            if not mx.array_equal(logits, expected, equal_nan=True):
                return self._give_up("a recorded step differs from a plain one", lambda: expected)
            return expected
        for row, count in zip(rows, counts, strict=True):
            for layer in row.attention_layers():
                layer.wrote(count)
            row.length += count
        return logits

    def profile(self, rows: Rows) -> dict[str, tuple[int, float]]:
        """How often each operation of a recorded step runs, and for how many seconds; nothing is stored."""
        ones = [1] * len(rows)
        return self._recordings[len(rows), ()].profile([0] * len(rows), *_places(rows, ones))

    def forget_adapted(self) -> None:
        """Drop the recordings of steps with adapters, which hold their weights."""
        for key in [key for key in self._recordings if key[1]]:
            self._drop(key)
        self._num_plain.clear()

    def is_for(self, adapters: Sequence[int]) -> bool:
        """Whether a step of such tokens is to be recorded. One with adapters is once its layout has lasted, for
        that ends whenever a row comes or goes. Counts the steps, so ask once.
        """
        key = _key(adapters)
        if not key[1] or key in self._recordings:
            return True
        if len(self._num_plain) >= MOST_COUNTED:
            self._num_plain.clear()
        self._num_plain[key] += 1
        return self._num_plain[key] > PLAIN_FIRST

    def _touch(self, key: Key) -> None:
        """Count this as used; of too many with adapters the one unused for longest goes."""
        if not key[1]:
            return
        self._recordings.move_to_end(key)
        adapted = [key for key in self._recordings if key[1]]
        if len(adapted) > MOST_ADAPTED:
            self._drop(adapted[0])

    def _drop(self, key: Key) -> None:
        del self._recordings[key]
        self._num_checked.pop(key, None)

    def _record(self, num_tokens: int, adapters: Sequence[int]) -> native.Recording:
        batch = Batch([Place(token, 1, 0) for token in range(num_tokens)])
        batch.positions = native.unknown(num_tokens)
        ids = native.unknown(num_tokens, 1)
        numbers: list[int] = []

        def attention(layers: Sequence[DenseLayer | PagedLayer]) -> RecordedLayer:
            numbers.append(len(numbers))
            return RecordedLayer(batch, layers[0], numbers[-1])

        views = [view_of([layer], attention) for layer in DenseStorage(self._kinds).layers]
        with self._choice.of(adapters):
            logits = self._model(ids, cache=views)
        recording = native.Recording(ids, batch.positions, logits[:, -1, :], len(numbers))
        if recording.foreign:
            log.debug("a recorded step has operations of MLX's own: %s", ", ".join(recording.foreign))
        return recording

    def _give_up(self, reason: str, plain: Callable[[], mx.array]) -> mx.array:
        log.warning("decode steps run unrecorded: %s", reason)
        self.reason = reason
        self._recordings.clear()
        return plain()


def _key(adapters: Sequence[int]) -> Key:
    return len(adapters), tuple(adapters) if any(slot != BASE for slot in adapters) else ()


def _places(rows: Rows, counts: Sequence[int]) -> tuple[Any, ...]:
    """Positions, and storage with room for so many tokens of each row, as a recording's run takes them."""
    positions = [row.length + i for row, count in zip(rows, counts, strict=True) for i in range(count)]
    paged = [row for row in rows if isinstance(row, PagedStorage)]
    if paged:
        pages = paged[0].pages
        tables = [table for same in zip(*(row.tables for row in paged), strict=True) for table in same]
        bases = [table.base for table in tables]
        numbers = [table.numbers for table in tables]
        return positions, pages.room_for_all(), bases, numbers, pages.group_of, counts
    arrays: list[mx.array] = []
    bases = []
    for same in zip(*(row.attention_layers() for row in rows), strict=True):
        for layer, count in zip(same, counts, strict=True):
            keys, values, base = layer.room_for_next(count)
            arrays += (keys, values)
            bases.append(base)
    return positions, arrays, bases, (), (), counts
