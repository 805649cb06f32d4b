"""Decode steps of rows with adapters against steps of the same rows without, in turn on one engine.

    python -m tests.bench.adapters [MODEL] [--rank 16] [--rows 4] [--prompt 64] [--new 65] [--repeats 5]

Adapters are noise beside every linear layer of the blocks. A figure is the median step of a run, and the median
of the repeats; `unrecorded` are the same steps without recordings. The ratio is over rows without an adapter on an
engine that has none mounted.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from engine.request import Request
from tests.adapters import write_adapter


def step_s(engine: Engine, adapters: list[str], num_prompt: int, num_new: int) -> float:
    """The median step of rows with these adapters."""
    plan = engine.plan()
    prompt = tuple((7 * i + 3) % engine.vocab_size for i in range(num_prompt))
    rows = [
        engine.submit(Request("bench", prompt, max_tokens=num_new, ignore_eos=True, adapter=name))
        for name in adapters
    ]
    for row in rows:
        while not row.prefilled:
            engine.prefill(plan.pieces([row], decoding=False))
    times_s = []
    while rows[0].finish_reason is None:
        started_s = time.perf_counter()
        engine.step(rows)
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    for name, default in (("rank", 16), ("rows", 4), ("prompt", 64), ("new", 65), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    path = Path(asked.model) if Path(asked.model).is_dir() else ensure(asked.model)
    plain, beside = (Engine.open(EngineConfig(model=path, no_prompt_cache=True)) for _ in range(2))
    names = [f"a{number}" for number in range(asked.rows)]
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(names):
            written = write_adapter(
                Path(folder) / name, beside.adapters.model, rank=asked.rank, seed=seed, size=0.01
            )
            print(beside.adapters.mount(name, written))
    rows = {
        "without, none mounted": (plain, [""] * asked.rows),
        "without, some mounted": (beside, [""] * asked.rows),
        "one adapter": (beside, names[:1] * asked.rows),
        "half without": (beside, (["", names[0]] * asked.rows)[: asked.rows]),
        "two adapters": (beside, (names[:2] * asked.rows)[: asked.rows]),
        "an adapter each": (beside, names),
    }
    taken: dict[str, list[float]] = {}
    for _ in range(asked.repeats):
        for how, (engine, adapters) in rows.items():
            taken.setdefault(how, []).append(step_s(engine, adapters, asked.prompt, asked.new))
            if any(adapters):
                recorded, engine._forward._recorded = engine._forward._recorded, None  # type: ignore[attr-defined]
                taken.setdefault(f"{how}, unrecorded", []).append(
                    step_s(engine, adapters, asked.prompt, asked.new)
                )
                engine._forward._recorded = recorded  # type: ignore[attr-defined]
    base = statistics.median(taken["without, none mounted"])
    print(f"\n{asked.rows} rows behind {asked.prompt} tokens, {asked.new} new, {asked.repeats} repeats")
    for how, times_s in taken.items():
        median = statistics.median(times_s)
        print(f"{how:32}{median * 1e3:9.2f} ms a step{median / base:8.2f}")


if __name__ == "__main__":
    main()
