"""Prompt lookup against one token a step, in turn: tasks that copy, free talk, and several streams.

    python -m tests.bench.speculation [MODEL] [--new 160] [--repeats 3] [--temp 0]
       [--tasks copy reformat copier function quote edit chat streams] [--drafter-layers N]

Each arm is a server's loop over the same engine's weights, without a network: requests in, tokens out. A rate is
tokens over the seconds from the first token to the last, over all streams; figures are medians of the repeats, and
ratios are of the arms of one repeat. Answers of both arms are compared. With `--drafter-layers` the model's own
first layers draft, in place of prompt lookup.

The task `copier` is `edit` by a model that makes no mistakes: every step is computed and drawn as ever, and then
the right token takes the place of the drawn one. In `function`, `quote` and `edit` a small model copies badly.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from engine.request import Request, Row, Sampling
from engine.sample.chain import sample
from engine.sample.state import Draw, noise_key
from engine.scheduler import Scheduler
from engine.speculate.drafts import Drafts, NoDrafts
from engine.speculate.governor import Costs, Governor
from tests.bench.checkpoint import shallow_checkpoint

FUNCTION = '''def total_price(items, tax_rate, discount=0.0):
    """Return the total price of all items, with tax and discount."""
    subtotal = 0.0
    for item in items:
        if item.quantity <= 0:
            raise ValueError(f"quantity of {item.name} must be positive")
        subtotal += item.price * item.quantity
    discounted = subtotal * (1.0 - discount)
    return round(discounted * (1.0 + tax_rate), 2)
'''
RECORD = """{
  "name": "Grace Hopper",
  "born": "1906-12-09",
  "field": "computer science",
  "employers": ["Vassar College", "United States Navy", "Remington Rand"],
  "known_for": {"compiler": "A-0", "language": "COBOL", "term": "debugging"},
  "awards": ["National Medal of Technology", "Presidential Medal of Freedom"]
}
"""
TASKS = {
    "copy": f"Repeat this JSON exactly, and write nothing else:\n\n{RECORD}",
    "edit": f"Rename the argument tax_rate to vat in this function. Write the whole function.\n\n{FUNCTION}",
    "quote": f"Quote this function line by line:\n\n{FUNCTION}",
    "function": f"Repeat this function exactly, and write nothing else:\n\n{FUNCTION}",
    "reformat": f"Write this JSON on one line:\n\n{RECORD}",
    "copier": f"Rename the argument tax_rate to vat in this function. Write the whole function.\n\n{FUNCTION}",
    "chat": "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
}
CHATS = (
    TASKS["chat"],
    "Explain why the sky is blue to a child.",
    "What should I cook tonight with rice and eggs?",
    "Write a short poem about autumn rain.",
)


class Copier:
    """The sampler step of a model that makes no mistakes."""

    def __init__(self, engine: Engine) -> None:
        self._sample = engine._sample
        text = FUNCTION.replace("tax_rate", "vat")
        tokens = [*engine.language.tokens.encode(text, False), next(iter(engine._end_tokens))]
        self._tokens = {noise_key(0, 0, index): token for index, token in enumerate(tokens)}

    def __call__(self, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
        mx.eval(self._sample(logits, draws))
        return mx.array([self._tokens.get(draw.key, 0) for draw in draws], mx.int32)


def prompts_of(task: str) -> tuple[str, ...]:
    return CHATS if task == "streams" else (TASKS[task],)


def run(
    engine: Engine, drafts: Drafts, prompts: tuple[str, ...], num_new: int, sampling: Sampling
) -> tuple[float, list[list[int]]]:
    """Tokens per second of all rows, and what they said."""
    scheduler = Scheduler(engine.plan(), num_slots=engine.num_slots, memory=engine.memory, drafts=drafts)
    rows: list[Row] = []
    for number, text in enumerate(prompts):
        said = engine.language.template.render([{"role": "user", "content": text}])
        tokens = tuple(engine.language.tokens.encode(said, False))
        own = dataclasses.replace(sampling, seed=number)
        rows.append(engine.submit(Request(str(number), tokens, own, num_new)))
        scheduler.add(rows[-1])
    started_s = 0.0
    while scheduler.has_work:
        tick = scheduler.tick()
        if not started_s and all(row.prefilled for row in rows):
            started_s, before = time.perf_counter(), sum(len(row.output) for row in rows)
        tick_s = time.perf_counter()
        events = engine.run(tick)
        if tick.decode and not tick.prefill:
            drafts.measured(tick, time.perf_counter() - tick_s)
        scheduler.settle(events)
    seconds = time.perf_counter() - started_s
    return (sum(len(row.output) for row in rows) - before) / seconds, [row.output for row in rows]


def opened(model: Path, folder: Path, drafter_layers: int | None) -> Engine:
    """An engine that knows nothing of earlier runs."""
    config = EngineConfig(
        model=model, draft_kind="prompt-lookup", prompt_lookup_max_batch=len(CHATS), no_prompt_cache=True
    )
    if drafter_layers is not None:
        shallow = shallow_checkpoint(model, folder, drafter_layers)
        config = dataclasses.replace(config, draft_kind="draft", draft_model=shallow)
    engine = Engine.open(config)
    forget(engine)
    return engine


def forget(engine: Engine) -> None:
    """Let the next task begin with nothing seen and nothing measured."""
    plain = Costs()
    before = engine.drafts.governor
    engine.drafts.governor = Governor(
        plain, Costs(like=plain), guesses=before.guesses, draft_cost=before.draft_cost
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, "streams"])
    parser.add_argument("--drafter-layers", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(ensure(asked.model), Path(folder), asked.drafter_layers)
    sampling = Sampling(temperature=asked.temp)
    for task in asked.tasks:
        prompts = prompts_of(task)
        forget(engine)
        engine._sample = Copier(engine) if task == "copier" else sample
        run(engine, engine.drafts, prompts, 48, sampling)  # records the steps and measures them
        rates: dict[str, list[float]] = {"plain": [], "drafted": []}
        counts = dataclasses.replace(engine.drafts.counts)
        for repeat in range(asked.repeats):
            arms = [("plain", NoDrafts()), ("drafted", engine.drafts)]
            said = {}
            for name, drafts in arms if repeat % 2 else arms[::-1]:
                rate, said[name] = run(engine, drafts, prompts, asked.new, sampling)
                rates[name].append(rate)
            assert said["plain"] == said["drafted"], "the answers differ"
        ratios = [drafted / plain for plain, drafted in zip(rates["plain"], rates["drafted"], strict=True)]
        rounds = engine.drafts.counts.rounds - counts.rounds
        accepted = (engine.drafts.counts.accepted - counts.accepted) / max(rounds, 1)
        print(
            f"{task:8} plain {statistics.median(rates['plain']):6.1f} tokens/s, drafted "
            f"{statistics.median(rates['drafted']):6.1f}, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {rounds} rounds, "
            f"{accepted:.2f} accepted in each, {engine.drafts.governor.num_pauses} pauses",
            flush=True,
        )
    for name in ("plain", "rounds"):
        costs = getattr(engine.drafts.governor, name).table()
        print(f"{name}, ms by tokens in a step:", {count: round(s * 1000, 1) for count, s in costs.items()})


if __name__ == "__main__":
    main()
