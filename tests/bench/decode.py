"""Prefill and decode of one and of several rows, against rivals on the same weights, in turn.

    python -m tests.bench.decode [MODEL] [--rivals portable mlx_lm llama] [--prompts 64 1024] [--new 33]
       [--repeats 3] [--rows 1 8] [--requantize] [--llama-python PATH --gguf FILE] [--profile]

Rivals run one row, but for `dense`, this engine with rows that are not paged: `mlx_lm` is `mlx_lm.stream_generate`
on the checkpoint, `portable` this engine without the compiled kernels, `llama` llama.cpp through llama-cpp-python
in an environment of its own, on the GGUF file that the checkpoint was imported from. MODEL `zoo:NAME` is a tiny
model of the tests' zoo. `--requantize` first makes the checkpoint what `mlx_lm.convert -q` makes of it: 4 bits in
groups of 64 and bfloat16. A decode rate is that of the median step; medians of the repeats; ratios are ours over
the first rival's. `--profile` says where one step's time goes, on one thread.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from mlx_lm import convert, load, stream_generate

from engine.config import EngineConfig
from engine.engine import Engine
from engine.forward import SpansForward
from engine.kernels import native
from engine.model.memory import human_bytes
from engine.model.pull import ensure
from engine.request import Request, Row
from tests.bench.checkpoint import float32_checkpoint
from tests.zoo import write_zoo

Rates = tuple[float, float]  # prompt tokens/s, new tokens/s
Arm = Callable[[], Rates]


def stored(engine: Engine, num_prompt: int, num_new: int, num_rows: int) -> list[Row]:
    """Rows whose prompts are stored, one after the other."""
    plan = engine.plan()
    prompt = tuple((7 * i + 3) % engine.vocab_size for i in range(num_prompt))
    request = Request("bench", prompt, max_tokens=num_new, ignore_eos=True)
    rows = [engine.submit(request) for _ in range(num_rows)]
    for row in rows:
        while not row.prefilled:
            engine.prefill(plan.pieces([row], decoding=False))
    return rows


def ours(engine: Engine, num_prompt: int, num_new: int, num_rows: int) -> Rates:
    started_s = time.perf_counter()
    rows = stored(engine, num_prompt, num_new, num_rows)
    prompt_rate = num_rows * num_prompt / (time.perf_counter() - started_s)
    times_s = []
    while rows[0].finish_reason is None:
        started_s = time.perf_counter()
        engine.step(rows)
        times_s.append(time.perf_counter() - started_s)
    return prompt_rate, num_rows / statistics.median(times_s)


def of_mlx_lm(path: Path, vocab_size: int, num_prompt: int, num_new: int) -> Arm:
    model, tokenizer = load(str(path))
    tokenizer.eos_token_ids = set()  # it runs to the asked length
    prompt = [(7 * i + 3) % vocab_size for i in range(num_prompt)]

    def run() -> Rates:
        started_s = time.perf_counter()
        at_s = [time.perf_counter() for _ in stream_generate(model, tokenizer, prompt, max_tokens=num_new)]
        steps_s = [b - a for a, b in itertools.pairwise(at_s)]
        return num_prompt / (at_s[0] - started_s), 1 / statistics.median(steps_s)

    return run


def of_llama(python: Path, gguf: Path, num_prompt: int, num_new: int) -> Arm:
    command = [str(python), str(Path(__file__).with_name("llama.py")), str(gguf), str(native.usable_cores())]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def run() -> Rates:
        print(json.dumps({"prompt": num_prompt, "new": num_new}), file=child.stdin, flush=True)
        prompt_rate, rate = json.loads(child.stdout.readline())
        return prompt_rate, rate

    return run


def medians(runs: list[Rates]) -> Rates:
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def compare(asked: argparse.Namespace, path: Path, engine: Engine, num_prompt: int) -> None:
    """One table: every arm in turn, as often as asked."""
    arms: dict[str, Arm] = {}
    for name in asked.rivals:
        if name == "llama":
            arms[name] = of_llama(asked.llama_python, asked.gguf, num_prompt, asked.new)
        elif name == "mlx_lm":
            arms[name] = of_mlx_lm(path, engine.vocab_size, num_prompt, asked.new)
        elif name == "dense":
            dense = Engine.open(EngineConfig(model=path, no_prompt_cache=True, decode_storage_backend="dense"))
            for num_rows in asked.rows:
                arms[f"dense, {num_rows} rows"] = lambda engine=dense, n=num_rows: ours(
                    engine, num_prompt, asked.new, n
                )
        else:
            portable = Engine.open(EngineConfig(model=path, portable=True, lookahead=False, no_prompt_cache=True))
            arms[name] = lambda engine=portable: ours(engine, num_prompt, asked.new, 1)
    for num_rows in asked.rows:
        arms[f"mlxcel, {num_rows} rows"] = lambda n=num_rows: ours(engine, num_prompt, asked.new, n)
    runs: dict[str, list[Rates]] = {name: [] for name in arms}
    for _ in range(asked.repeats):
        for name, arm in arms.items():
            runs[name].append(arm())
    base = medians(next(iter(runs.values())))
    print(f"\n{num_prompt} prompt and {asked.new} new tokens, {asked.repeats} repeats")
    print(f"{'':16}{'prefill tok/s':>15}{'ratio':>8}{'decode tok/s':>15}{'ratio':>8}")
    for name, taken in runs.items():
        prefill, decode = medians(taken)
        print(f"{name:16}{prefill:15.2f}{prefill / base[0]:8.2f}{decode:15.2f}{decode / base[1]:8.2f}")


def memory(engine: Engine, weight_bytes: int, num_prompt: int) -> None:
    """MLX's peak while a request is served, over the weights and the keys and values it ends with."""
    mx.reset_peak_memory()
    rows = stored(engine, num_prompt, 64, 1)
    while len(rows[0].output) < 63:
        engine.step(rows)
    kept = weight_bytes + engine.kv_bytes(rows)
    engine.step(rows)
    peak = mx.get_peak_memory()
    print(f"\nMLX's peak {human_bytes(peak)}, {peak / kept:.2f} of weights and keys ({human_bytes(kept)})")


def profile(engine: Engine, num_prompt: int, num_rows: int) -> None:
    """Where a recorded step's time goes: the best of 20 for each operation, on one thread."""
    rows = stored(engine, num_prompt, 40, num_rows)
    for _ in range(4):
        engine.step(rows)
    forward = engine._forward
    assert isinstance(forward, SpansForward)
    best: dict[str, tuple[int, float]] = {}
    for _ in range(20):
        for name, (count, seconds) in forward.profile([row.storage for row in rows]).items():
            best[name] = (count, min(seconds, best.get(name, (0, seconds))[1]))
    print(f"\none step of {num_rows} rows behind {num_prompt} tokens, one thread")
    for name, (count, seconds) in sorted(best.items(), key=lambda item: -item[1][1]):
        print(f"{name:36}{count:5} times{seconds * 1e3:9.3f} ms")
    print(f"{'together':36}{'':11}{sum(seconds for _, seconds in best.values()) * 1e3:9.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument(
        "--rivals", choices=["dense", "portable", "mlx_lm", "llama"], nargs="+", default=["portable"]
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requantize", action="store_true")
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.model.startswith("zoo:"):
            path = write_zoo(Path(folder) / "zoo", asked.model.removeprefix("zoo:"))
        else:
            path = Path(asked.model) if Path(asked.model).is_dir() else ensure(asked.model)
        if asked.requantize:
            whole = float32_checkpoint(path, Path(folder))
            path = whole / "4-bit"
            convert(str(whole), str(path), quantize=True, q_bits=4, q_group_size=64, dtype="bfloat16")
        engine = Engine.open(EngineConfig(model=path, no_prompt_cache=True))
        print(f"{asked.model}{', requantized' if asked.requantize else ''}", *engine.notes, sep="\n  ")
        weight_bytes = mx.get_active_memory()
        memory(engine, weight_bytes, asked.prompts[0])
        for num_prompt in asked.prompts:
            compare(asked, path, engine, num_prompt)
            if asked.profile:
                for num_rows in asked.rows:
                    profile(engine, num_prompt, num_rows)


if __name__ == "__main__":
    main()
