"""What two ranks of one machine cost or give: `python -m tests.bench.ranks`.

A random float32 llama whose heads two ranks divide, one greedy answer after the other and four at once; one
process on MLX's own operations beside two ranks by tensors, and a pipeline of the same sizes. On one machine the
ranks share the cores, so this shows what crossing costs, not what a second machine gives.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx2

from tests.launched import LAUNCH, PROGRAM, client, ranked, two_free_ports
from tests.tiny import CONFIGS, write_checkpoint

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
LATENCY = """
import time, mlx.core as mx
group = mx.distributed.init(strict=True)
x = mx.ones((1, 1, 512))
for _ in range(20): mx.eval(mx.distributed.all_sum(x))
started = time.perf_counter()
for _ in range(500): mx.eval(mx.distributed.all_sum(x))
if group.rank() == 0: print(f"all_sum of 512 floats: {(time.perf_counter() - started) * 2:.2f} ms")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        latency = [str(LAUNCH), "-n", "2", "--backend", "ring", "-p", str(two_free_ports()), "--"]
        subprocess.run([*latency, sys.executable, "-c", LATENCY], stdin=subprocess.PIPE, check=True)
        CONFIGS["qwen2"] = CONFIGS["llama"] | {"model_type": "qwen2"}
        for family, flags in (("llama", "--split tensor"), ("qwen2", "--split pipeline")):
            checkpoint = write_checkpoint(folder / family, family, **SIZES)
            with alone(checkpoint, folder) as asking:
                say(f"{family}, one process", asking, asked.new, asked.repeats)
            with ranked(checkpoint, folder, *flags.split(), "--parallel", "4") as ranks, ranks.client() as asking:
                say(f"{family}, two ranks, {flags}", asking, asked.new, asked.repeats)


@contextmanager
def alone(checkpoint: Path, folder: Path) -> Iterator[httpx2.Client]:
    """One process that serves the checkpoint without compiled kernels."""
    listens_at = folder / "alone.sock"
    command = [*PROGRAM, "serve", str(checkpoint), "--host", str(listens_at), "--portable", "--no-prompt-cache"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not listens_at.exists():
            time.sleep(0.1)
        with client(listens_at) as asking:
            yield asking
    finally:
        process.terminate()
        process.wait()


def say(what: str, asking: httpx2.Client, num_tokens: int, repeats: int) -> None:
    rates = {rows: [rate(asking, rows, num_tokens) for _ in range(repeats + 1)][1:] for rows in (1, 4)}
    for rows, each in rates.items():
        print(
            f"{what}, {rows} at once: {median(each):.1f} tokens/s ({min(each):.1f} to {max(each):.1f})", flush=True
        )


def rate(asking: httpx2.Client, num_rows: int, num_tokens: int) -> float:
    """Tokens per second of so many equal requests, sent together."""

    def post(number: int) -> int:
        body = {"prompt": f"{number} bottles", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answered = asking.post("/v1/completions", json=body)
        answered.raise_for_status()
        count: int = answered.json()["usage"]["completion_tokens"]
        return count

    started_s = time.perf_counter()
    with ThreadPoolExecutor(num_rows) as threads:
        total = sum(threads.map(post, range(num_rows)))
    return total / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
