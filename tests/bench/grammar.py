"""What a grammar costs: decode steps of free and of constrained rows, in turn, in one run.

    python -m tests.bench.grammar [MODEL] [--rows 1 4] [--new 96] [--repeats 5]

Free rows, rows that write a JSON object of any kind, and rows that keep to a schema answer the same prompt, each
sampled with a seed of its own. A rate is that of the median step in which all rows still run; medians of the
repeats, and of their ratios. Beside them: finding the masks of all rows, and putting them on, in the median.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from engine.request import Grammar, Request, Row, Sampling
from engine.sample.chain import _mask
from engine.sample.state import draw_of

PROMPT = "Describe twelve different animals as JSON: name, legs, weight, and where they live. Be detailed."
STRING = {"type": "string"}
ANIMAL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "legs", "weight_kg", "lives_in"],
    "properties": {
        "name": STRING,
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
        "weight_kg": {"type": "number"},
        "lives_in": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 4},
    },
}
SCHEMAS = {"any object": {"type": "object"}, "schema": {"type": "array", "items": ANIMAL, "minItems": 12}}


def grammar(name: str) -> Grammar | None:
    return Grammar("json", json.dumps(SCHEMAS[name])) if name in SCHEMAS else None


def opened(engine: Engine, name: str, num_rows: int, num_new: int, repeat: int) -> list[Row]:
    """Rows whose prompts are stored, one after the other."""
    prompt = tuple(engine.tokens.encode(engine.template.render([{"role": "user", "content": PROMPT}]), False))
    plan = engine.plan()
    rows = [
        engine.submit(
            Request(
                "bench",
                prompt,
                Sampling(temperature=0.8, top_k=40, seed=100 * repeat + i),
                num_new,
                ignore_eos=name == "free",
                grammar=grammar(name),
            )
        )
        for i in range(num_rows)
    ]
    for row in rows:
        while not row.prefilled:
            engine.prefill(plan.pieces([row], decoding=False))
    return rows


def step_s(engine: Engine, rows: list[Row]) -> float:
    """Seconds of the median step while all rows run."""
    times_s = []
    while all(row.finish_reason is None for row in rows):
        started_s = time.perf_counter()
        engine.step(rows)
        times_s.append(time.perf_counter() - started_s)
    for row in rows:
        if row.finish_reason is None:
            engine.cancel(row)
    return statistics.median(times_s)


def mask_s(engine: Engine, num_rows: int, num_new: int) -> tuple[float, float]:
    """Seconds in the median to find the masks of all rows, and to put them on."""
    rows = opened(engine, "schema", num_rows, num_new, 0)
    logits = mx.random.normal((num_rows, engine.vocab_size))
    mx.eval(logits)
    found_s, put_s = [], []
    while all(row.finish_reason is None for row in rows):
        engine.step(rows)
        if any(row.finish_reason is not None for row in rows):
            break
        started_s = time.perf_counter()
        masks = [row.constraint.allowed(row.output) for row in rows]
        found_s.append(time.perf_counter() - started_s)
        draws = [draw_of(row, 0, mask) for row, mask in zip(rows, masks, strict=True)]
        started_s = time.perf_counter()
        mx.eval(_mask(logits, draws))
        put_s.append(time.perf_counter() - started_s)
    for row in rows:
        if row.finish_reason is None:
            engine.cancel(row)
    return statistics.median(found_s), statistics.median(put_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    path = Path(asked.model) if Path(asked.model).is_dir() else ensure(asked.model)
    engine = Engine.open(EngineConfig(model=path, no_prompt_cache=True))
    print(asked.model, *engine.notes, sep="\n  ")
    for num_rows in asked.rows:
        taken: dict[str, list[float]] = {name: [] for name in ("free", *SCHEMAS)}
        for repeat in range(asked.repeats):
            for name, steps in taken.items():
                steps.append(step_s(engine, opened(engine, name, num_rows, asked.new, repeat)))
        found_s, put_s = mask_s(engine, num_rows, asked.new)
        print(f"\n{num_rows} rows, at most {asked.new} new tokens, {asked.repeats} repeats")
        print(f"{'':16}{'step ms':>10}{'tok/s':>10}{'ratio':>8}")
        for name, steps in taken.items():
            median_s = statistics.median(steps)
            ratio = statistics.median(free / own for free, own in zip(taken["free"], steps, strict=True))
            print(f"{name:16}{median_s * 1e3:10.2f}{num_rows / median_s:10.1f}{ratio:8.2f}")
        print(f"masks of all rows: found in {found_s * 1e3:.3f} ms, put on in {put_s * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
