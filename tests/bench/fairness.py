"""Two streams, a long prompt and a short request: what each policy of prefill and decode does to whom.

    python -m tests.bench.fairness [MODEL] [--arms 16 24 4 mixed:32 mixed:64 mixed:128] [--prompt 4096]
       [--repeats 2]

An arm is a grant interval, or `mixed:BUDGET`. Two streams decode; a long prompt arrives, and one second later a
short request. From the long prompt's arrival to its first token are measured: the gaps between the streams'
tokens (p50, p95, largest), both times to first token, and tokens per second, new ones and all. Medians of the
repeats, arms in turn. Beside a figure stands its bound, computed from what the run's own ticks took: a gap is
one step and one piece; the long prompt's C pieces lie in C windows of a piece and N steps, beside the short
one's piece; the short one waits for the running tick, may have to let a parked piece and a step pass, and has
its own. Time in which the process was stopped is left out.
"""

import argparse
import itertools
import queue
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import MlxcelError
from engine.loop import EngineLoop, Ticket
from engine.model.pull import ensure
from engine.plan import Tick
from engine.request import Event, Output, Request

LATER_S = 1.0  # from the long prompt to the short request
SHORT_TOKENS = 32
STOPPED_S = 2.0  # what no thread waits for a processor
PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Ran:
    """One tick, when it began and what it took."""

    tick: Tick
    began_s: float
    took_s: float


class Timed:
    """Notes what each tick of an engine takes."""

    def __init__(self, engine: Engine) -> None:
        self.ran: list[Ran] = []
        run = engine.run

        def timed(tick: Tick) -> list[Event]:
            began_s = time.perf_counter()
            events = run(tick)
            self.ran.append(Ran(tick, began_s, time.perf_counter() - began_s))
            return events

        engine.run = timed  # type: ignore[method-assign]


class Asked:
    """One request to a loop, and when each of its tokens came."""

    def __init__(self, loop: EngineLoop, name: str, num_prompt: int, num_new: int) -> None:
        self.tokens_s: list[float] = []
        self._came: queue.Queue[None] = queue.Queue()
        prompt = tuple((31 * len(name) + 7 * i + i * i % 11 + 3) % 40000 for i in range(num_prompt))
        self.asked_s = time.perf_counter()
        request = Request(name, prompt, max_tokens=num_new, ignore_eos=True)
        self.ticket: Ticket = loop.submit(request, self._hear)

    def _hear(self, event: Event | MlxcelError) -> None:
        if isinstance(event, Output):
            self.tokens_s.append(time.perf_counter())
            self._came.put(None)

    def wait(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._came.get(timeout=PATIENCE_S)


class Stops:
    """When this process was stopped, as a thread that sleeps a little at a time finds out."""

    def __init__(self) -> None:
        self._stops: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before_s = time.perf_counter()
        while True:
            time.sleep(0.05)
            now_s = time.perf_counter()
            if now_s - before_s > STOPPED_S:
                self._stops.append((before_s, now_s))
            before_s = now_s

    def seconds(self, since_s: float, until_s: float) -> float:
        """From one moment to another, without the time in between that was not ours."""
        lost_s = sum(max(min(end, until_s) - max(start, since_s), 0.0) for start, end in self._stops)
        return until_s - since_s - lost_s


def settings_of(arm: str) -> dict[str, int]:
    """The engine's settings that an arm names."""
    _, mixes, number = arm.rpartition("mixed:")
    return {"mixed_step" if mixes else "prefill_grant_interval": int(number)}


def figures(model: Path, arm: str, num_prompt: int, stops: Stops) -> dict[str, float]:
    """What one run of the scene gives."""
    config = EngineConfig(model=model, parallel=4, kv_unified=True, no_prompt_cache=True, **settings_of(arm))
    timed: list[Timed] = []

    def opened(config: EngineConfig) -> Engine:
        engine = Engine.open(config)
        timed.append(Timed(engine))
        return engine

    loop = EngineLoop(config, open_engine=opened)
    loop.start()
    streams = [Asked(loop, name, 64, 6000) for name in ("a stream", "another stream")]
    for stream in streams:
        stream.wait(16)
    long = Asked(loop, "long", num_prompt, 4)
    time.sleep(LATER_S)
    short = Asked(loop, "short one", SHORT_TOKENS, 16)
    long.wait(1)
    short.wait(1)
    loop.stop()
    return summary(timed[0], config, streams, long, short, stops)


def summary(
    timed: Timed, config: EngineConfig, streams: list[Asked], long: Asked, short: Asked, stops: Stops
) -> dict[str, float]:
    until_s = long.tokens_s[0]
    gaps_s = sorted(
        stops.seconds(a, b)
        for stream in streams
        for a, b in itertools.pairwise(stream.tokens_s)
        if long.asked_s <= b <= until_s
    )
    new = sum(long.asked_s <= at_s <= until_s for one in (*streams, short) for at_s in one.tokens_s)
    ran = [one for one in timed.ran if long.asked_s <= one.began_s < until_s]
    took_s = {id(one): stops.seconds(one.began_s, one.began_s + one.took_s) for one in ran}
    pieces = [one for one in ran if _has_piece_of(long, one.tick)]
    pieces_s = [took_s[id(one)] for one in pieces]
    steps_s = [took_s[id(one)] for one in ran if not one.tick.prefill] or [0.0]
    num_steps = 0 if config.mixed_step else config.prefill_grant_interval
    largest_s = max(pieces_s) + (0.0 if config.mixed_step else max(steps_s))
    long_s = stops.seconds(long.asked_s, until_s)
    own_s = max(took_s[id(one)] for one in ran if _has_piece_of(short, one.tick))
    window_s = statistics.mean(pieces_s) + num_steps * statistics.mean(steps_s)
    return {
        "gap p50 s": statistics.median(gaps_s),
        "gap p95 s": gaps_s[int(0.95 * (len(gaps_s) - 1))],
        "gap max s": gaps_s[-1],
        "gap bound s": largest_s,
        "short ttft s": stops.seconds(short.asked_s, short.tokens_s[0]),
        "short bound s": 2 * largest_s + own_s,
        "long ttft s": long_s,
        "long bound s": len(pieces) * window_s + own_s,
        "long ticks": len(ran),
        "ticks bound": len(pieces) * (num_steps + 1) + 2 * bool(config.mixed_step),
        "piece s": statistics.median(pieces_s),
        "step s": statistics.median(steps_s),
        "new tokens/s": new / long_s,
        "all tokens/s": (new + len(long.ticket.request.prompt) + SHORT_TOKENS) / long_s,
    }


def _has_piece_of(asked: Asked, tick: Tick) -> bool:
    return any(piece.row.request is asked.ticket.request for piece in tick.prefill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--arms", nargs="+", default=["16", "24", "4", "mixed:32", "mixed:64", "mixed:128"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    model = ensure(asked.model)
    stops = Stops()
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in asked.arms}
    for _ in range(asked.repeats):
        for arm, taken in runs.items():
            taken.append(figures(model, arm, asked.prompt, stops))
            print(arm, {name: round(figure, 3) for name, figure in taken[-1].items()}, file=sys.stderr)
    print(f"{asked.prompt} prompt tokens, {asked.repeats} repeats")
    print(f"{'':16}" + "".join(f"{arm:>12}" for arm in runs))
    for name in next(iter(runs.values()))[0]:
        middles = [statistics.median(run[name] for run in taken) for taken in runs.values()]
        print(f"{name:16}" + "".join(f"{middle:12.3f}" for middle in middles))


if __name__ == "__main__":
    main()
