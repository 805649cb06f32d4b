"""A linear layer to whose product rows add low-rank products of their own, each that of its adapter.

The class of an adapted layer is replaced by a subclass of it; its names and weights stay what they are. All rows
of a forward share the layer's own product. Where they have one adapter, its two factors follow as plain products;
where they have several, the factors of all adapters are gathered row by row, as those of experts are. Both give a
row the same bits with the compiled kernels, and a row without an adapter those that it has without any mounted.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.kernels import functions, native

BASE = 0  # the slot of rows without an adapter


class Choice:
    """Which adapter the tokens of the running forward have, by slots. Outside of `of` it is none.

    `one` is the slot of all of them, or None where they differ; then `each` `[tokens]` has that of every entry of
    the first axis, and `present` those that occur.
    """

    def __init__(self) -> None:
        self.one: int | None = BASE
        self.each: mx.array | None = None
        self.present: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def of(self, slots: Sequence[int]) -> Iterator[None]:
        """While the model is called; `slots` are those of its first axis, or one and the same of all."""
        self.present = frozenset(slots)
        self.one = slots[0] if len(self.present) == 1 else None
        self.each = mx.array(list(slots), mx.int32) if self.one is None else None
        try:
            yield
        finally:
            self.one, self.each, self.present = BASE, None, frozenset()


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter does to one layer: y becomes ratio * y + up·(down·x) + shift, all float32.

    `down` `[rank, inputs]`, `up` `[outputs, rank]`. `ratio` and `shift` `[outputs]` are DoRA's: the magnitude of
    each output over the norm of its weights, and what that would take from the layer's bias. Rows of `down`
    beyond `rank` are zeros.
    """

    down: mx.array
    up: mx.array
    rank: int
    ratio: mx.array | None = None
    shift: mx.array | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes alone."""
        more = 0 if self.ratio is None else 2 * self.ratio.size
        return 4 * (self.rank * (self.down.shape[1] + self.up.shape[0]) + more)


class LowRank:
    """The factors of every adapter at one layer, by their slots; None where one leaves the layer as it is.

    They are evaluated and lie one behind the other, padded to the largest rank with zeros, which change no sum.
    """

    def __init__(self, choice: Choice, factors: Sequence[Factors | None]) -> None:
        given = [each for each in factors if each is not None]
        rank = max(each.rank for each in given)
        inputs, outputs = given[0].down.shape[1], given[0].up.shape[0]
        self._choice = choice
        downs = [_padded(each.down[: each.rank] if each else None, rank, inputs) for each in factors]
        ups = [_padded(each.up[:, : each.rank].T if each else None, rank, outputs) for each in factors]
        self._down = mx.stack(downs)
        self._up = mx.contiguous(mx.stack(ups).swapaxes(1, 2))
        self._ratio = self._shift = None
        if any(each.ratio is not None for each in given):
            self._ratio = mx.stack([_or(each.ratio if each else None, mx.ones, outputs) for each in factors])
            self._shift = mx.stack([_or(each.shift if each else None, mx.zeros, outputs) for each in factors])
        mx.eval(_present(self._down, self._up, self._ratio, self._shift))
        self.factors = tuple(self._views(slot, each) for slot, each in enumerate(factors))
        self.was_called = False

    @staticmethod
    def bytes_of(factors: Sequence[Factors | None]) -> int:
        """What these take together at one layer."""
        given = [each for each in factors if each is not None]
        rank, inputs, outputs = max(each.rank for each in given), given[0].down.shape[1], given[0].up.shape[0]
        more = 2 * outputs if any(each.ratio is not None for each in given) else 0
        return 4 * len(factors) * (rank * (inputs + outputs) + more)

    def _views(self, slot: int, given: Factors | None) -> Factors | None:
        if given is None:
            return None
        scales = given.ratio is not None
        ratio = self._ratio[slot] if scales and self._ratio is not None else None
        shift = self._shift[slot] if scales and self._shift is not None else None
        views = Factors(self._down[slot], self._up[slot], given.rank, ratio, shift)
        mx.eval(_present(views.down, views.up, ratio, shift))
        return views

    def added(self, x: mx.array, product: mx.array) -> mx.array:
        """`product` of the layer's input `x`, with what the adapters of the running forward add to it."""
        self.was_called = True
        choice = self._choice
        if choice.one is not None:
            factors = self.factors[choice.one]
            return product if factors is None else _with_one(factors, x, product)
        if all(self.factors[slot] is None for slot in choice.present):
            return product
        return self._with_each(x, product)

    def _with_each(self, x: mx.array, product: mx.array) -> mx.array:
        slots = self._choice.each
        assert slots is not None, "the slots of several adapters are known one by one"
        if x.ndim < 2 or x.shape[0] != slots.size:
            raise ValueError(f"an adapted layer is given {x.shape}, and the forward has {slots.size} tokens")
        rows = x[:, None] if x.ndim == 2 else x
        which = slots.reshape(-1, *[1] * (rows.ndim - 3))
        added = _gathered(_gathered(rows, self._down, which), self._up, which).reshape(product.shape)
        if self._ratio is None or self._shift is None:
            return _sum(product, added)
        apart = (slots.size, *[1] * (product.ndim - 2), -1)
        shift = self._shift[slots].reshape(apart)
        return _sum(product, added + shift, self._ratio[slots].reshape(apart))


def _with_one(factors: Factors, x: mx.array, product: mx.array) -> mx.array:
    if functions.in_use():
        added = native.linear(native.linear(x, factors.down), factors.up)
    else:
        added = (x.astype(mx.float32) @ factors.down.T) @ factors.up.T
    return _sum(product, added if factors.shift is None else added + factors.shift, factors.ratio)


def _gathered(rows: mx.array, stacked: mx.array, which: mx.array) -> mx.array:
    """Each of `rows` times the transpose of the matrix that is chosen for it."""
    if functions.in_use():
        return native.gather_linear(rows, stacked, which)
    return mx.gather_mm(rows.astype(mx.float32), stacked.swapaxes(-1, -2), rhs_indices=which)


def _sum(product: mx.array, added: mx.array, ratio: mx.array | None = None) -> mx.array:
    scaled = product if ratio is None else product * ratio
    return (scaled + added).astype(product.dtype)


def _padded(matrix: mx.array | None, rank: int, width: int) -> mx.array:
    if matrix is None:
        return mx.zeros((rank, width))
    missing = rank - matrix.shape[0]
    return mx.pad(matrix, [(0, missing), (0, 0)]) if missing else matrix


def _present(*arrays: mx.array | None) -> list[mx.array]:
    return [array for array in arrays if array is not None]


def _or(vector: mx.array | None, default: Any, size: int) -> mx.array:
    filled: mx.array = default((size,)) if vector is None else vector
    return filled


@functools.cache
def _adapted(original: Any) -> type:
    def call(self: Any, x: mx.array) -> mx.array:
        product: mx.array = original.__call__(self, x)
        low_rank: LowRank | None = self.low_rank
        return product if low_rank is None else low_rank.added(x, product)

    said = {"__call__": call, "__module__": original.__module__, "low_rank": None}
    return type(f"Adapted{original.__name__}", (original,), said)


def low_rank_of(layer: Any) -> LowRank | None:
    """What adapters do to `layer` now."""
    low_rank: LowRank | None = getattr(layer, "low_rank", None)
    return low_rank


def set_low_rank(layer: Any, low_rank: LowRank | None) -> None:
    """Have adapters do this to `layer` from now on."""
    if not hasattr(type(layer), "low_rank"):
        layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]
    layer.low_rank = low_rank
