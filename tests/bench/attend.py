"""One call of the compiled attention, decode and prefill, with each type of stored keys and values, in turn.

    python -m tests.bench.attend [--heads 9] [--key-heads 3] [--dim 64] [--threads 1] [--repeats 9]

Prints, in ms, the median of the time taken and the least processor time. Another build is measured by PYTHONPATH.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import mlx.core as mx

from engine.cache.dtype import BY_NAME
from engine.kernels import native

CASES = [(1, 64), (1, 1024), (1, 4096), (1, 16384), (512, 512), (2048, 2048), (512, 4096)]


def timed(arguments: Sequence[object]) -> tuple[tuple[float, float], Sequence[mx.array]]:
    """Seconds and processor seconds of one call, and the storage to go on with."""
    started = time.perf_counter(), time.process_time()
    outputs = native.attend(*arguments)  # type: ignore[arg-type]
    mx.eval(outputs)
    return (time.perf_counter() - started[0], time.process_time() - started[1]), outputs[1:]


def figures(times: Sequence[tuple[float, float]]) -> str:
    median, least = statistics.median(wall for wall, _ in times), min(cpu for _, cpu in times)
    return f"{median * 1e3:.3f} ({least * 1e3:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--key-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    print(f"kernels: {native.start(asked.threads)}")
    for count, length in CASES:
        queries = mx.random.normal((count, asked.heads, 1, asked.dim))
        new = mx.random.normal((count, asked.key_heads, 1, asked.dim))
        shape = (1, asked.key_heads, length, asked.dim)
        # Several layers, so that no call finds its keys in the cache of the processor for the call before.
        num_layers = 16 if count == 1 else 1
        storage = {
            name: [[mx.random.normal(shape).astype(dtype) for _ in range(2)] for _ in range(num_layers)]
            for name, dtype in BY_NAME.items()
        }
        mx.eval(queries, new, storage)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in BY_NAME}
        for _ in range(asked.repeats):
            for name, layers in storage.items():
                for layer in layers:
                    place = [(0, count, length - count, 0)]
                    seconds, layer[:] = timed((queries, (new, new), layer, place, asked.dim**-0.5))
                    taken[name].append(seconds)
        said = ", ".join(f"{name} {figures(times)}" for name, times in taken.items())
        print(f"{count} of {length}: {said}", flush=True)


if __name__ == "__main__":
    main()
