"""The one contact with the compiled package `mlxcel-native`, which may be absent, stale or broken.

`start` decides once for the process whether it is used and says why not. Every function here keeps the promise of
`docs/decisions/008-native-kernels.md`: an output row's bits depend on that row alone.
"""

import importlib.metadata
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

_absent: ImportError | None = None
try:
    import mlxcel_native
except ImportError as fault:
    mlxcel_native, _absent = None, fault


@dataclass(frozen=True, slots=True)
class Native:
    """The compiled kernels in use: which instructions, and how many threads share a call."""

    level: str
    num_threads: int

    def __str__(self) -> str:
        return f"native ({self.level}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''})"


def said(started: Native | str) -> str:
    """What `start` gave, as the start-up line says it."""
    return str(started) if isinstance(started, Native) else f"portable ({started})"


def start(num_threads: int = 0) -> Native | str:
    """Try the package and set its threads (0: the cores this process may use), or say why it cannot be used."""
    if mx.default_device() != mx.cpu:
        return f"MLX on {mx.default_device().type.name}"
    if mlxcel_native is None:
        missing = isinstance(_absent, ModuleNotFoundError)
        return "no compiled package" if missing else f"the compiled package does not load: {_absent}"
    here = importlib.metadata.version("mlx").partition("+")[0]
    if mlxcel_native.built_for_mlx != here:
        return f"compiled for mlx {mlxcel_native.built_for_mlx}, not {here}"
    mlxcel_native.set_num_threads(num_threads or usable_cores())
    mlxcel_native.passed_self_test = False
    try:
        self_test()
    except Exception as fault:  # noqa: BLE001 - whatever a stale binary does, MLX's own operations remain
        return f"the compiled package fails its self-test: {fault}"
    mlxcel_native.passed_self_test = True
    return Native(mlxcel_native.level(), mlxcel_native.num_threads())


def linear(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """`x` `[..., inputs]` times the transpose of `weight` `[outputs, inputs]`, plus `bias`: float32.

    With `bits`, the weight is packed as `mx.quantize` does it. Raises ValueError where shapes or types do not fit.
    """
    product: mx.array = mlxcel_native.linear(x, weight, scales, biases, bias, group_size, bits)
    return product


def embed(
    ids: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """The rows `ids` `[...]` of `weight`, as `linear` takes it: float32 `[..., inputs]`. No such id: NaN."""
    rows: mx.array = mlxcel_native.embed(ids, weight, scales, biases, group_size, bits)
    return rows


def gather_linear(
    x: mx.array,
    weight: mx.array,
    indices: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """`linear` of each row with the weight of the expert that was chosen for it: float32 `[..., rows, outputs]`.

    `x` `[..., rows, inputs]`, its leading axes broadcast against whole numbers `indices` `[...]`; `weight`
    `[experts, outputs, inputs]`, packed where `bits` says so, `bias` `[experts, outputs]`. Where an index names no
    expert, the output is not a number. Raises ValueError where shapes or types do not fit.
    """
    product: mx.array = mlxcel_native.gather_linear(x, weight, indices, scales, biases, bias, group_size, bits)
    return product


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Each last axis of `x` over the root of its mean square, times `weight`: float32."""
    normed: mx.array = mlxcel_native.rms_norm(x, weight, eps)
    return normed


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """Each last axis of `x` less its mean, over its standard deviation, times `weight` plus `bias`: float32."""
    normed: mx.array = mlxcel_native.layer_norm(x, weight, bias, eps)
    return normed


def rope(
    x: mx.array,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array:
    """`mx.fast.rope` in float32: `x` `[B, …, L, dim]`, `offset` a position or one for each of the batch."""
    positions = offset if isinstance(offset, mx.array) else mx.array(offset, mx.int32)
    turned: mx.array = mlxcel_native.rope(x, dims, traditional, base, scale, positions, freqs)
    return turned


def argmax(rows: mx.array) -> mx.array:
    """Where the largest value of each row `[n, m]` is, the first of equal ones: int32 `[n]`.

    At once where the rows are evaluated; MLX's own where the kernels do not run.
    """
    if mlxcel_native is None or not mlxcel_native.passed_self_test:
        return mx.argmax(rows, axis=-1).astype(mx.int32)
    places: mx.array = mlxcel_native.argmax(rows)
    return places


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """gate * sigmoid(gate) * x, of one shape: float32."""
    product: mx.array = mlxcel_native.swiglu(gate, x)
    return product


def gelu(
    gate: mx.array, approximation: Literal["none", "tanh", "sigmoid"] = "none", x: mx.array | None = None
) -> mx.array:
    """GELU of each value, exact or approximated, times that of `x` where it is given: float32."""
    product: mx.array = mlxcel_native.gelu(gate, approximation, x)
    return product


def clipped_swiglu(gate: mx.array, x: mx.array, slope: float, limit: float) -> mx.array:
    """gate * sigmoid(slope * gate) * (x + 1), the gate at most `limit` and x between -limit and limit: float32."""
    product: mx.array = mlxcel_native.clipped_swiglu(gate, x, slope, limit)
    return product


def attend(
    queries: mx.array,
    new: tuple[mx.array, mx.array] | None,
    storage: Sequence[mx.array],
    places: Sequence[tuple[int, int, int, int]],
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> list[mx.array]:
    """Causal attention of spans over their rows' dense storage; all float32 but the storage.

    `queries` `[T, heads, 1, dim]`; `storage` each span's keys and values, `[1, key heads, capacity, dim]`, all of
    float32, float16 or bfloat16; `places` each span's first token in T, number of tokens, position of the first,
    and position that its storage begins with. `new` keys and values `[T, key heads, 1, dim]` are written into
    storage first, in place, rounded to nearest even and to the type's largest value where they are beyond it.
    With `softcap`, scores become softcap * tanh(score / softcap).

    Returns the output `[T, heads, 1, dim]`, and behind it the storage where it was written to: go on with that.
    Raises ValueError where shapes, types or places do not fit.
    """
    keys, values = new if new is not None else (None, None)
    outputs: list[mx.array] = mlxcel_native.attend(
        queries, keys, values, storage, places, scale, window, sinks, softcap
    )
    return outputs


def attend_paged(
    queries: mx.array,
    new: tuple[mx.array, mx.array] | None,
    pools: tuple[mx.array, mx.array],
    tables: Sequence[mx.array],
    places: Sequence[tuple[int, int, int, int]],
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> list[mx.array]:
    """`attend` over pools of keys and of values, `[1, key heads, blocks of 16, dim]`, with the same bits.

    `tables` names each span's blocks, int32 `[n]`, from the position that its place begins with, a multiple of
    16.

    Returns the output, and behind it both pools where they were written to. Raises ValueError as `attend`;
    evaluating raises RuntimeError, and nothing is written, where a table names a block that the pool lacks.
    """
    keys, values = new if new is not None else (None, None)
    outputs: list[mx.array] = mlxcel_native.attend_paged(
        queries, keys, values, *pools, tables, places, scale, window, sinks, softcap
    )
    return outputs


def unknown(*shape: int) -> mx.array:
    """An int32 array that nobody has computed: what a recording follows from. Reading it raises."""
    placeholder: mx.array = mlxcel_native.unknown(shape)
    return placeholder


def attend_in_recording(
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    appends: bool,
    layer: int,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """While a step is recorded: attention of the rows' new tokens, `[tokens, heads, 1, dim]`.

    `layer` numbers the keys and values that a run is given; `new` is written behind them if `appends`, else it
    shows their shape.
    """
    output: mx.array = mlxcel_native.attend_in_program(queries, *new, appends, layer, scale, window, sinks)
    return output


class Recording:
    """How `result` follows from `ids` `[tokens, 1]` and `positions` `[tokens]`, both `unknown`, as one call.

    Raises ValueError where that cannot be recorded. A run gives the bits that a step of MLX's graph gives.
    """

    def __init__(self, ids: mx.array, positions: mx.array, result: mx.array, num_layers: int) -> None:
        self._program = mlxcel_native.Program(ids, positions, result, num_layers)

    def run(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        storage: Sequence[mx.array],
        bases: Sequence[int],
        tables: Sequence[Any] = (),
        groups: Sequence[int] = (),
        counts: Sequence[int] = (),
    ) -> mx.array:
        """One step. `storage` are keys and values of each layer and, in it, each row: `[1, heads, capacity, dim]`.

        They are evaluated, and written in place; `bases` are the positions that they begin with. With `tables`,
        int32 in a buffer, they are pools of each layer, `[1, heads, blocks of 16, dim]`; `groups` says which group
        a layer is of, and tables and bases are those of each group and, in it, each row. `counts` says how many of
        the tokens are each row's, where that is not one.
        """
        result: mx.array = self._program.run(ids, positions, storage, bases, tables, groups, counts)
        return result

    def profile(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        storage: Sequence[mx.array],
        bases: Sequence[int],
        tables: Sequence[Any] = (),
        groups: Sequence[int] = (),
        counts: Sequence[int] = (),
    ) -> dict[str, tuple[int, float]]:
        """One step on this thread alone: how often each operation ran, and for how many seconds in all."""
        times: dict[str, tuple[int, float]] = self._program.profile(
            ids, positions, storage, bases, tables, groups, counts
        )
        return times

    @property
    def num_phases(self) -> int:
        """How often the threads of a step meet."""
        phases: int = self._program.num_phases
        return phases

    @property
    def foreign(self) -> list[str]:
        """The operations in it that are MLX's own."""
        names: list[str] = self._program.foreign
        return names


def lay_together(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Copies of evaluated arrays, one behind the other in memory that the processor finds its way in quickly."""
    copies: list[mx.array] = mlxcel_native.lay_together(arrays)
    return copies


def self_test() -> None:
    """Hold each kernel against NumPy on a few values. Raises AssertionError."""
    # Whole numbers below 16 are exact in every type here, so the sums are compared exactly.
    weight = np.arange(5 * 64).reshape(5, 64) * 7 % 16
    x = mx.array((np.arange(7 * 64).reshape(7, 64) * 5 % 9 - 4).astype(np.float32))
    expected = np.array(x) @ weight.T
    packed = (weight.reshape(5, 8, 8) << 4 * np.arange(8)).sum(axis=-1).astype(np.uint32)
    ones, both = mx.ones((5, 2)), mx.ones((2, 5, 2))
    for rows in (1, 7):
        for product in (
            linear(x[:rows], mx.array(weight.astype(np.float32))),
            linear(x[:rows], mx.array(weight.astype(np.float32)).astype(mx.bfloat16)),
            linear(x[:rows], mx.array(packed), ones, mx.zeros_like(ones), None, 32, 4),
        ):
            assert np.array_equal(np.array(product), expected[:rows]), "a product of whole numbers is wrong"
        experts, places = mx.array(np.stack([packed, packed[::-1]])), mx.array([[1, 0]] * rows)
        gathered = gather_linear(x[:rows, None, None], experts, places, both, mx.zeros_like(both), None, 32, 4)
        assert np.array_equal(
            np.array(gathered[:, :, 0]), np.stack([expected[:rows, ::-1], expected[:rows]], axis=1)
        ), "a product of whole numbers with an expert is wrong"
    attended = mx.fast.scaled_dot_product_attention(*[x[None, None]] * 3, scale=0.1, mask="causal")
    turned = mx.fast.rope(x[None], 32, traditional=False, base=1e4, scale=1.0, offset=3)
    for said, mine, plain in (
        ("RMSNorm", rms_norm(x, None, 1e-5), mx.fast.rms_norm(x, None, 1e-5)),
        ("LayerNorm", layer_norm(x, x[0], x[1], 1e-5), mx.fast.layer_norm(x, x[0], x[1], 1e-5)),
        ("GELU", gelu(x), x * (1 + mx.erf(x * math.sqrt(0.5))) / 2),
        ("SwiGLU", swiglu(x, x), x * mx.sigmoid(x) * x),
        ("the rotary embedding", rope(x[None], 32, False, 1e4, 1.0, 3), turned),
        ("attention", _attended(x), attended),
    ):
        same = mx.allclose(mine.reshape(7, 64), plain.reshape(7, 64), rtol=1e-4, atol=1e-4)
        assert same, f"{said} is wrong"


def _attended(x: mx.array) -> mx.array:
    """Causal attention of the rows of `x` to themselves."""
    tokens, storage = x[:, None, None], [mx.zeros((1, 1, 8, x.shape[1]))] * 2
    return attend(tokens, (tokens, tokens), [mx.array(each) for each in storage], [(0, x.shape[0], 0, 0)], 0.1)[0]


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may use: its affinity, within the quota of its control group."""
    affinity: Callable[[int], Any] | None = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(root))))


def _quota(root: Path) -> float:
    """Processors that the control group grants, or infinity: version 2's file, else version 1's pair."""
    try:
        granted, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        folder = root / "sys/fs/cgroup/cpu"
        try:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return math.inf
    if not granted.isdigit() or not period.isdigit() or int(granted) == 0 or int(period) == 0:
        return math.inf
    return int(granted) / int(period)
