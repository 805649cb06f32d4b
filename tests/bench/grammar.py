"""What a grammar costs: decode steps of free and of constrained rows, one of each in turn.

    python -m tests.bench.grammar [MODEL] [--rows 1 4] [--steps 300]

Free rows, rows that write a JSON object of any kind, and rows that keep to a schema answer the same prompt, each
sampled with a seed of its own; rows that have ended begin again, outside of what is measured. The median step, its
rate, and that over the free rows'. Beside them: finding the masks of all rows, and putting them on, in the median.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from engine.request import Grammar, Request, Row, Sampling
from engine.sample.chain import _masked
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
NUM_NEW = 160
SCHEMAS = {"any object": {"type": "object"}, "schema": {"type": "array", "items": ANIMAL, "minItems": 12}}


def grammar(name: str) -> Grammar | None:
    return Grammar("json", json.dumps(SCHEMAS[name])) if name in SCHEMAS else None


class Arm:
    """Rows of one kind that run, again and again."""

    def __init__(self, engine: Engine, name: str, num_rows: int) -> None:
        self._engine = engine
        self._name = name
        self._seeds = itertools.count()
        self._prompt = tuple(
            engine.language.tokens.encode(
                engine.language.template.render([{"role": "user", "content": PROMPT}]), False
            )
        )
        self.rows = [self._opened() for _ in range(num_rows)]
        self.steps_s: list[float] = []

    def step(self) -> None:
        self.rows = [row if row.finish_reason is None else self._opened() for row in self.rows]
        started_s = time.perf_counter()
        self._engine.step(self.rows)
        self.steps_s.append(time.perf_counter() - started_s)

    def _opened(self) -> Row:
        """A row that decodes."""
        while True:
            request = Request(
                "bench",
                self._prompt,
                Sampling(temperature=0.8, top_k=40, seed=next(self._seeds)),
                NUM_NEW,
                ignore_eos=self._name == "free",
                grammar=grammar(self._name),
            )
            row, plan = self._engine.submit(request), self._engine.plan()
            while not row.prefilled:
                self._engine.prefill(plan.pieces([row], decoding=False))
            if row.finish_reason is None:
                return row


def mask_s(arm: Arm, vocab_size: int, num_steps: int) -> tuple[float, float]:
    """Seconds in the median to find the masks of all rows, and to put them on."""
    logits = mx.random.normal((len(arm.rows), vocab_size))
    mx.eval(logits)
    found_s, put_s = [], []
    for _ in range(num_steps):
        arm.step()
        rows = [row for row in arm.rows if row.finish_reason is None]
        if len(rows) < len(arm.rows):
            continue
        started_s = time.perf_counter()
        masks = [row.constraint.allowed(row.output) for row in rows]
        found_s.append(time.perf_counter() - started_s)
        draws = [draw_of(row, 0, mask) for row, mask in zip(rows, masks, strict=True)]
        started_s = time.perf_counter()
        mx.eval(_masked(logits, draws))
        put_s.append(time.perf_counter() - started_s)
    return statistics.median(found_s), statistics.median(put_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    path = Path(asked.model) if Path(asked.model).is_dir() else ensure(asked.model)
    engine = Engine.open(EngineConfig(model=path, no_prompt_cache=True))
    print(asked.model, *engine.notes, sep="\n  ")
    for num_rows in asked.rows:
        arms = {name: Arm(engine, name, num_rows) for name in ("free", *SCHEMAS)}
        for _ in range(asked.steps):
            for arm in arms.values():
                arm.step()
        taken = {name: statistics.median(arm.steps_s) for name, arm in arms.items()}
        found_s, put_s = mask_s(arms["schema"], engine.vocab_size, 50)
        print(f"\n{num_rows} rows, {asked.steps} steps")
        print(f"{'':16}{'step ms':>10}{'tok/s':>10}{'ratio':>8}")
        for name, step_s in taken.items():
            print(f"{name:16}{step_s * 1e3:10.2f}{num_rows / step_s:10.1f}{taken['free'] / step_s:8.2f}")
        print(f"masks of all rows: found in {found_s * 1e3:.3f} ms, put on in {put_s * 1e3:.3f} ms")
        for row in itertools.chain.from_iterable(arm.rows for arm in arms.values()):
            if row.finish_reason is None:
                engine.cancel(row)


if __name__ == "__main__":
    main()
