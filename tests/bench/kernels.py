"""The compiled product of packed weights against MLX's own, in turn; medians and the best of the repeats.

python -m tests.bench.kernels [--outputs 49152] [--inputs 576] [--bits 4] [--group-size 64] [--rows 1 8]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from engine.kernels import native


def seconds(product: Callable[[], mx.array]) -> float:
    started_s = time.perf_counter()
    mx.eval(product())
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=49152)
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    print(f"kernels: {native.start()}")
    packing = {"group_size": asked.group_size, "bits": asked.bits}
    packed = mx.quantize(mx.random.normal((asked.outputs, asked.inputs)), **packing)
    mx.eval(packed)
    packed = native.lay_together(packed)
    num_bytes = sum(array.nbytes for array in packed)
    for num_rows in asked.rows:
        x = mx.random.normal((num_rows, asked.inputs))
        mx.eval(x)
        arms = {
            "mlx": lambda x=x: mx.quantized_matmul(x, *packed, transpose=True, **packing),
            "native": lambda x=x: native.linear(x, *packed, **packing),
        }
        times_s: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(asked.repeats):
            for name, product in arms.items():
                times_s[name].append(seconds(product))
        for pick, said in ((statistics.median, "median"), (min, "best")):
            theirs, ours = (pick(taken) for taken in times_s.values())
            rate = num_bytes / ours / 1e9
            print(
                f"{num_rows} rows, {said}: mlx {theirs * 1e3:.2f} ms, native {ours * 1e3:.2f} ms, "
                f"ratio {theirs / ours:.1f}, {rate:.1f} GB/s"
            )


if __name__ == "__main__":
    main()
