"""Decode steps, recorded once for each number of rows and run again as one call of the compiled kernels.

A step of the same rows builds the same graph every time, and MLX hands each of its operations over by itself. A
recording calls the unmodified model once with ids and positions that nobody knows yet; what it builds is kept as a
list of tasks (`engine/native/src/program.cpp`). Positions, ids and the rows' storage are its inputs, so nothing of
the step it was made in stays in it. The first steps are held against plain ones bit for bit.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from engine.cache.attend import Batch, Place, RecordedLayer
from engine.cache.kinds import LayerKind
from engine.cache.rows import DenseLayer, DenseStorage
from engine.cache.views import view_of
from engine.kernels import native

log = logging.getLogger(__name__)

NUM_CHECKED = 2


class RecordedSteps:
    """The recorded decode steps of one model. `reason` says why there are none any more, once that is so."""

    def __init__(self, model: Any, kinds: Sequence[LayerKind]) -> None:
        self._model = model
        self._kinds = kinds
        self._recordings: dict[int, native.Recording] = {}
        self._num_checked: Counter[int] = Counter()
        self.reason: str | None = None

    def logits(self, ids: Sequence[int], rows: Sequence[DenseStorage], plain: Callable[[], mx.array]) -> mx.array:
        """Logits `[rows, vocab]` after one more token of each row, which is stored; `plain`: the same unrecorded.

        Unrecorded steps are not evaluated.
        """
        num_rows = len(rows)
        if self.reason is not None:
            return plain()
        if num_rows not in self._recordings:
            try:
                self._recordings[num_rows] = self._record(num_rows)
            except Exception as fault:  # noqa: BLE001 - a model's own code may raise anything, and does without values
                return self._give_up(f"a step cannot be recorded: {fault}", plain)
        layers = _layers(rows)
        logits = self._recordings[num_rows].run(ids, *_places(rows, layers))
        if self._num_checked[num_rows] < NUM_CHECKED:
            self._num_checked[num_rows] += 1
            expected = plain()
            if not mx.array_equal(logits, expected, equal_nan=True):
                return self._give_up("a recorded step differs from a plain one", lambda: expected)
            return expected
        for layer in layers:
            layer.wrote(1)
        for row in rows:
            row.length += 1
        return logits

    def profile(self, rows: Sequence[DenseStorage]) -> dict[str, tuple[int, float]]:
        """How often each operation of a recorded step runs, and for how many seconds; nothing is stored."""
        return self._recordings[len(rows)].profile([0] * len(rows), *_places(rows, _layers(rows)))

    def _record(self, num_rows: int) -> native.Recording:
        batch = Batch([Place(row, 1, 0) for row in range(num_rows)])
        batch.positions = native.unknown(num_rows)
        ids = native.unknown(num_rows, 1)
        numbers: list[int] = []

        def attention(layers: Sequence[DenseLayer]) -> RecordedLayer:
            numbers.append(len(numbers))
            return RecordedLayer(batch, layers[0], numbers[-1])

        views = [view_of([layer], attention) for layer in DenseStorage(self._kinds).layers]
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


def _layers(rows: Sequence[DenseStorage]) -> list[DenseLayer]:
    """The rows' layers as a recording numbers them: by layer, then by row."""
    return [layer for same in zip(*(row.attention_layers() for row in rows), strict=True) for layer in same]


def _places(
    rows: Sequence[DenseStorage], layers: Sequence[DenseLayer]
) -> tuple[list[int], list[mx.array], list[int]]:
    """Positions, storage with room for a token, and the positions that it begins with, for a recording's run."""
    storage: list[mx.array] = []
    bases: list[int] = []
    for layer in layers:
        keys, values, base = layer.room_for_next()
        storage += (keys, values)
        bases.append(base)
    return [row.length for row in rows], storage, bases
