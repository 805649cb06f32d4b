"""Prefill and decode of one and of several rows, against a rival on the same checkpoint, in turn.

    python -m tests.bench.decode [MODEL] [--rival mlx_lm|portable] [--prompt 64]
       [--new 24] [--repeats 3] [--rows 1 4 8]

Rivals run one row: `mlx_lm` is `mlx_lm.stream_generate` on the checkpoint as mlx-lm loads it, `portable` this
engine without the compiled kernels. Medians of the repeats; ratios are ours over the rival's.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mlx_lm import load, stream_generate

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from engine.request import Request

Rates = tuple[float, float]  # prompt tokens/s, new tokens/s


def ours(engine: Engine, prompt: list[int], num_new: int, num_rows: int) -> Rates:
    """Store `num_rows` prompts one after the other, then decode the rows together."""
    plan = engine.plan()
    request = Request("bench", tuple(prompt), max_tokens=num_new, ignore_eos=True)
    rows = [engine.submit(request) for _ in range(num_rows)]
    started_s = time.perf_counter()
    for row in rows:
        while not row.prefilled:
            engine.prefill(plan.pieces([row], decoding=False))
    prefilled_s = time.perf_counter()
    while rows[0].finish_reason is None:
        engine.step(rows)
    ended_s = time.perf_counter()
    prompt_rate = num_rows * len(prompt) / (prefilled_s - started_s)
    return prompt_rate, num_rows * (num_new - 1) / (ended_s - prefilled_s)


def theirs(model: object, tokenizer: object, prompt: list[int], num_new: int) -> Rates:
    started_s = time.perf_counter()
    times_s = [time.perf_counter() for _ in stream_generate(model, tokenizer, prompt, max_tokens=num_new)]
    return len(prompt) / (times_s[0] - started_s), (len(times_s) - 1) / (times_s[-1] - times_s[0])


def rival(name: str, path: Path, prompt: list[int], num_new: int) -> Callable[[], Rates]:
    if name == "portable":
        engine = Engine.open(EngineConfig(model=path, portable=True, lookahead=False))
        return lambda: ours(engine, prompt, num_new, 1)
    model, tokenizer = load(str(path))
    tokenizer.eos_token_ids = set()  # it runs to the asked length
    return lambda: theirs(model, tokenizer, prompt, num_new)


def medians(runs: list[Rates]) -> Rates:
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rival", choices=["mlx_lm", "portable"], default="portable")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    asked = parser.parse_args()
    path = ensure(asked.model)
    engine = Engine.open(EngineConfig(model=path))
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(asked.prompt)]
    arms = {f"{asked.rival}, 1 row": rival(asked.rival, path, prompt, asked.new)}
    for num_rows in asked.rows:
        arms[f"mlxcel, {num_rows} rows"] = lambda n=num_rows: ours(engine, prompt, asked.new, n)
    runs: dict[str, list[Rates]] = {name: [] for name in arms}
    for _ in range(asked.repeats):
        for name, arm in arms.items():
            runs[name].append(arm())
    base = medians(runs[f"{asked.rival}, 1 row"])
    print(f"{asked.model}, {engine.mode}, {engine.notes[0]}")
    print(f"{asked.prompt} prompt and {asked.new} new tokens, {asked.repeats} repeats")
    print(f"{'':16}{'prefill tok/s':>15}{'ratio':>8}{'decode tok/s':>15}{'ratio':>8}")
    for name, taken in runs.items():
        prefill, decode = medians(taken)
        print(f"{name:16}{prefill:15.2f}{prefill / base[0]:8.2f}{decode:15.2f}{decode / base[1]:8.2f}")


if __name__ == "__main__":
    main()
