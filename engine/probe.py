"""Which mode a model is run in: found by running two short rows together in each and each row alone.

The first mode whose logits agree wins; a list of families would be wrong with the next release of mlx-lm. The
verdict is kept between runs, for the same checkpoint, versions and device.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.adapters.layer import BASE
from engine.cache.adapter import HeadSelection, select_before_head
from engine.encoder.encoder import Encoder
from engine.encoder.forward import WholeForward
from engine.errors import ModelError
from engine.forward import AloneForward, Forward, RowsForward, Span, SpansForward
from engine.remembered import Remembered, fingerprint

TOLERANCE = {mx.float32: 1e-4}
TOLERANCE_HALF = 5e-2

Make = Callable[[Any, HeadSelection], Forward]

MODES: dict[str, Make] = {
    "spans": SpansForward,
    "rows": RowsForward,
    "rows, keys gathered": lambda model, selection: RowsForward(model, selection, gathered=4),
    "rows, keys gathered by group": lambda model, selection: RowsForward(model, selection, gathered=5),
    "alone": AloneForward,
}
BY_HANDLES = ("spans", "rows")  # modes whose attention runs on what is stored


@dataclass(frozen=True, slots=True)
class Verdict:
    """The mode chosen, why, and the prefill rate seen while trying (prompt tokens per second).

    `hidden_size` is that of the states in front of the output head, 0 where it is not found, None: not known yet.
    """

    mode: str
    reason: str
    tokens_per_s: float
    hidden_size: int | None = None


ChooseForward = Callable[[Verdict | None, Any, int], tuple[Forward, Verdict]]


def probe(model: Any, vocab_size: int, modes: Mapping[str, Make] = MODES) -> tuple[Forward, Verdict]:
    """Try the modes in their order. Raises ModelError for a model that cannot even be run one row at a time."""
    selection = select_before_head(model, vocab_size)
    alone = modes["alone"](model, selection)
    try:
        _run(alone, vocab_size, together=False)  # compiles what has to be compiled
    except Exception as fault:
        raise ModelError(f"the model cannot be run here: {_first_sentence(fault)}") from fault
    started_s = time.perf_counter()
    reference = _run(alone, vocab_size, together=False)
    tokens_per_s = _NUM_TOKENS / (time.perf_counter() - started_s)
    if not mx.isfinite(reference).all().item():
        raise ModelError("the model's logits are not numbers: its weights or its configuration are damaged")
    refusals: dict[str, list[str]] = {}
    for mode, make in modes.items():
        if mode == "alone":
            break
        try:
            forward = make(model, selection)
            together = _run(forward, vocab_size, together=True)
            worst = _difference(together, reference)
        except Exception as fault:  # noqa: BLE001 - a model's code may raise anything; the verdict says what
            refusals.setdefault(_first_sentence(fault), []).append(mode)
            continue
        if worst <= TOLERANCE.get(reference.dtype, TOLERANCE_HALF):
            # A mode may have an attention of its own; then it is its own company that it must not notice.
            if worst:
                worst = _difference(together, _run(forward, vocab_size, together=False))
            exactly = "exactly" if worst == 0 else f"within {worst:.0e}"
            agrees = f"rows together equal each alone {exactly}"
            return forward, Verdict(mode, "; ".join([agrees, *_told(refusals)]), tokens_per_s)
        refusals.setdefault(f"rows together differ from each alone by {worst:.0e}", []).append(mode)
    return alone, Verdict("alone", "; ".join(_told(refusals)), tokens_per_s)


def differs(forward: Forward, vocab_size: int, adapter: int) -> str:
    """Why rows cannot choose the adapter of that slot, or an empty string: a row with it beside one without is
    what each is alone.
    """
    try:
        alone = _run(forward, vocab_size, together=False, adapter=adapter)
        if not mx.isfinite(alone).all().item():
            return "what it computes are no numbers: its weights are damaged"
        worst = _difference(_run(forward, vocab_size, together=True, adapter=adapter), alone)
    except Exception as fault:  # noqa: BLE001 - a model's code may raise anything; the reason is told
        return _first_sentence(fault)
    if worst > TOLERANCE.get(alone.dtype, TOLERANCE_HALF):
        return f"a row with it differs beside others by {worst:.0e}"
    return ""


def _told(refusals: dict[str, list[str]]) -> list[str]:
    """Each reason once, behind the modes that it refuses."""
    batching = len(MODES) - 1
    return [
        f"{'all others' if len(modes) == batching else ' / '.join(modes)}: {reason}"
        for reason, modes in refusals.items()
    ]


def forward_of(model: Any, vocab_size: int, verdict: Verdict) -> Forward:
    """The forward that an earlier probe chose."""
    return MODES[verdict.mode](model, select_before_head(model, vocab_size))


def forward_by(known: Verdict | None, model: Any, vocab_size: int) -> tuple[Forward, Verdict]:
    """The forward that an earlier probe chose or, where there was none, one chooses now; an encoder has but one.
    Raises as `probe`.
    """
    if isinstance(model, Encoder):
        return WholeForward(model), Verdict(WholeForward.name, "an encoder sees a text as a whole", 0.0)
    if known is None:
        return probe(model, vocab_size)
    return forward_of(model, vocab_size, known), known


class Verdicts:
    """Verdicts of earlier runs, one file each in `folder`. One that cannot be read or written is no matter.

    `kernels` says which were in use: a verdict's rate is theirs.
    """

    def __init__(self, folder: Path) -> None:
        self._remembered = Remembered(folder)

    def find(self, checkpoint: Path, kernels: str) -> Verdict | None:
        try:
            said = self._remembered.read(fingerprint(checkpoint, said=(kernels,)))
            hidden_size = said["hidden_size"]
            verdict = Verdict(
                str(said["mode"]),
                str(said["reason"]),
                float(said["tokens_per_s"]),
                None if hidden_size is None else int(hidden_size),
            )
            return verdict if verdict.mode in (*MODES, WholeForward.name) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, checkpoint: Path, kernels: str, verdict: Verdict) -> None:
        with contextlib.suppress(OSError):
            self._remembered.keep(fingerprint(checkpoint, said=(kernels,)), asdict(verdict))


_LENGTHS = (2, 4)
_NUM_TOKENS = sum(_LENGTHS) + 1


def _run(forward: Forward, vocab_size: int, *, together: bool, adapter: int = BASE) -> mx.array:
    """Logits of two rows: the first one's prompt, its first step beside the other's prompt, a step of both. The
    second has the adapter of that slot.
    """
    short, long = ([(7 * i + n) % vocab_size for i in range(n)] for n in _LENGTHS)
    first, second = forward.open_dense(), forward.open_dense()
    steps = [
        [Span(first, short, num_sampled=1)],
        [Span(first, [11 % vocab_size], num_sampled=1), Span(second, long, num_sampled=1, adapter=adapter)],
        [
            Span(second, [13 % vocab_size], num_sampled=1, adapter=adapter),
            Span(first, [5 % vocab_size], num_sampled=1),
        ],
    ]
    logits = []
    for spans in steps:
        logits += [forward.run(spans)] if together else [forward.run([span]) for span in spans]
        mx.eval(logits)
    return mx.concatenate(logits, axis=0)


def _difference(one: mx.array, other: mx.array) -> float:
    """Largest difference, relative to the largest logit; NaN never passes for agreement."""
    worst = _largest(one - other) / max(_largest(other), 1e-9)
    return worst if worst == worst else float("inf")


def _largest(array: mx.array) -> float:
    return float(mx.abs(array.astype(mx.float32)).max().item())  # type: ignore[arg-type]


def _first_sentence(fault: Exception) -> str:
    return (str(fault) or type(fault).__name__).splitlines()[0].split(". ")[0].rstrip(".")[:120]
