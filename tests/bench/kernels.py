"""The compiled product of packed weights against MLX's own and a mere read of the same bytes, in turn.

Medians and the best. The weights are there several times over, more than the caches hold, and gone through one
after the other, so that they come out of memory and the threads are awake, as in a decode step.

python -m tests.bench.kernels [--outputs 49152] [--inputs 576] [--bits 4] [--group-size 64] [--rows 1 8]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from engine.kernels import native

COLD_BYTES = 128 << 20
Run = Callable[[], object]


def recorded(x: mx.array, packed: Sequence[mx.array], packing: dict[str, int]) -> Run:
    """The product as a decode step runs it: recorded, its rows looked up by their numbers."""
    num_rows = x.shape[0]
    ids, positions = native.unknown(num_rows, 1), native.unknown(num_rows)
    product = native.linear(native.embed(ids, x)[:, 0], *packed, **packing)
    recording = native.Recording(ids, positions, product, 0)
    return lambda: recording.run(range(num_rows), [0] * num_rows, [], [])


def read(arrays: Sequence[mx.array], pool: ThreadPoolExecutor, num_threads: int) -> Run:
    """Go through all bytes with NumPy's own loops, each thread through a part."""
    words = [np.array(array.flatten(), copy=False).view(np.uint64) for array in arrays]
    shares = [[np.array_split(array, num_threads)[i] for array in words] for i in range(num_threads)]

    def go_through(arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            np.bitwise_xor.reduce(array)

    return lambda: list(pool.map(go_through, shares))


def seconds(run: Run) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=49152)
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    started = native.start()
    print(f"kernels: {started}")
    assert isinstance(started, native.Native)
    packing = {"group_size": asked.group_size, "bits": asked.bits}
    one = mx.quantize(mx.random.normal((asked.outputs, asked.inputs)), **packing)
    mx.eval(one)
    num_bytes = sum(array.nbytes for array in one)
    copies = [native.lay_together(one) for _ in range(-(-COLD_BYTES // num_bytes))]
    pool = ThreadPoolExecutor(started.num_threads)
    for num_rows in asked.rows:
        x = mx.random.normal((num_rows, asked.inputs))
        mx.eval(x)
        arms: dict[str, list[Run]] = {
            "mlx": [lambda x=x: mx.eval(mx.quantized_matmul(x, *copies[0], transpose=True, **packing))],
            "native": [recorded(x, packed, packing) for packed in copies],
            "read": [read(packed, pool, started.num_threads) for packed in copies],
        }
        times_s: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(asked.repeats):
            for name, runs in arms.items():
                times_s[name] += [seconds(run) for run in runs]
        for pick, said in ((statistics.median, "median"), (min, "best")):
            theirs, ours, reading = (pick(taken) for taken in times_s.values())
            print(
                f"{num_rows} rows, {said}: mlx {theirs * 1e3:.2f} ms, native {ours * 1e3:.2f} ms, "
                f"ratio {theirs / ours:.1f}; {num_bytes / ours / 1e9:.1f} GB/s where a read has "
                f"{num_bytes / reading / 1e9:.1f}, {reading / ours:.2f} of it"
            )


if __name__ == "__main__":
    main()
