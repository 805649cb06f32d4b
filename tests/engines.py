"""Engines for tests: opened from a checkpoint, and watched for their logits."""

import random
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.direct import DirectEngine
from engine.engine import Engine
from engine.kernels import native
from engine.model.load import LoadedModel
from engine.plan import Draft, Piece, PrefillPlan, Tick
from engine.probe import Verdict
from engine.request import Request, Row, Sampling
from engine.sample.chain import sample
from engine.scheduler import Scheduler
from engine.speculate.drafter import Drafter
from engine.speculate.drafts import NoDrafts, plain_reason
from tests.tiny import VOCAB_SIZE


class Guesses(NoDrafts):
    """Drafts that are the tokens to come, by the request's id, but for about every third, which is wrong."""

    def __init__(self, answers, *, most=7, seed=0):
        self._answers = answers
        self._most = most
        self._random = random.Random(seed)
        self.num_accepted = self.num_rounds = 0

    def of(self, rows, *, num_running):
        return tuple(draft for row in rows if (draft := self._draft(row)) is not None)

    def settled(self, row, num_drafted, tokens, num_rows):
        self.num_rounds += num_drafted > 0
        self.num_accepted += len(tokens) - 1

    def _draft(self, row):
        done = len(row.output)
        count = min(self._random.randint(0, self._most), row.limit_tokens - done - 1)
        tokens = list(self._answers[row.request.id][done : done + count])
        tokens += [0] * (count - len(tokens))
        if count <= 0 or plain_reason(row):
            return None
        if self._random.random() < 0.7:
            at = self._random.randrange(count)
            tokens[at] = (tokens[at] + 1) % VOCAB_SIZE
        return Draft(row, count, tuple(tokens))


def drive(engine, requests, plan=None, *, drafts=None, on_tick=lambda scheduler: None):
    """Run requests as the loop does; their tokens and rows. Prefilled tokens are what was not adopted."""
    scheduler = Scheduler(
        plan or engine.plan(), num_slots=len(requests), memory=engine.memory, drafts=drafts or engine.drafts
    )
    rows = [engine.submit(request) for request in requests]
    for row in rows:
        scheduler.add(row)
    computed = dict.fromkeys(rows, 0)
    while scheduler.has_work:
        tick = scheduler.tick()
        assert tick, "rows wait and nothing runs"
        for piece in tick.prefill:
            computed[piece.row] += piece.num_tokens
        scheduler.settle(engine.run(tick))
        scheduler.check()
        engine.prompts.check()
        on_tick(scheduler)
    for row in rows:
        assert row.storage is None, "an ended row holds storage"
        assert row.num_preempted or computed[row] == len(row.request.prompt) - row.num_cached
    return [row.output for row in rows], rows


# How rows can be kept here; paged ones need the compiled kernels.
BACKENDS = ["dense", "paged"] if isinstance(native.start(), native.Native) else ["dense"]


class Watched:
    """An engine whose logits are kept, by the key of the draw they served. `mode` takes the place of the probe.

    Every row is computed from its start, unless the prompt cache is asked for.
    """

    def __init__(
        self, model: Path | LoadedModel, *, mode: str | None = None, drafter: Drafter | None = None, **config
    ) -> None:
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        config = {"no_prompt_cache": True, **config}
        if isinstance(model, Path):
            self.engine = Engine.open(EngineConfig(model=model, **config))
        else:
            verdict = None if mode is None else Verdict(mode, "as the test says", 1000.0)
            self.engine = Engine(
                model, EngineConfig(model=Path("in memory"), **config), verdict=verdict, drafter=drafter
            )
        self.engine._sample = self._keep

    def _keep(self, logits, draws):
        for row, draw in zip(np.array(logits), draws, strict=True):
            self.logits[draw.key] = row
        return sample(logits, draws)

    def request(self, name: str, num_prompt: int, num_new: int, *, seed: int = 0, **sampling) -> Request:
        """A request over a made-up prompt; the seed makes its draws its own."""
        vocab = self.engine.vocab_size
        prompt = tuple((31 * seed + 7 * i + 3) % vocab for i in range(num_prompt))
        return Request(name, prompt, Sampling(seed=seed, **sampling), num_new, ignore_eos=True)

    def alone(self, request: Request) -> list[int]:
        return [output.token for output in DirectEngine(self.engine).complete(request)]

    def store(self, row: Row, size: int) -> None:
        """Prefill `row` in pieces of `size` tokens."""
        while not row.prefilled:
            stop = min(row.cursor + size, len(row.request.prompt))
            self.engine.prefill([Piece(row, row.cursor, stop)])

    def finish(self, row: Row) -> list[int]:
        while row.finish_reason is None:
            self.engine.step([row])
        return row.output

    def together(self, requests: dict[int, Request], piece: int = 1000) -> list[Row]:
        """Run the requests in one batch, each joining at the step that is its key."""
        rows, step = [], 0
        while step < max(requests) or any(row.finish_reason is None for row in rows):
            step += 1
            if step in requests:
                rows.append(self.engine.submit(requests[step]))
                self.store(rows[-1], piece)
            live = [row for row in rows if row.finish_reason is None]
            if live:
                self.engine.step(live)
        return rows

    def scheduled(self, requests: list[Request], plan: PrefillPlan) -> tuple[list[Row], list[Tick]]:
        """Run the requests as the loop does, a new one every third tick; the rows, and the ticks."""
        rows = [self.engine.submit(request) for request in requests]
        scheduler = Scheduler(plan, num_slots=len(rows), grant_interval=3)
        ticks: list[Tick] = []
        while scheduler.has_work or len(ticks) < 3 * len(rows):
            arrived, between = divmod(len(ticks), 3)
            if not between and arrived < len(rows):
                scheduler.add(rows[arrived])
            ticks.append(scheduler.tick())
            scheduler.settle(self.engine.run(ticks[-1]) if ticks[-1] else [])
            scheduler.check()
        return rows, ticks
