"""N clients against `mlxcel serve` and `mlx_lm.server` on one float32 checkpoint, in turn, in one run.

    python -m tests.bench.serve [MODEL] [--clients 1 4 8] [--new 24] [--repeats 3] [--gap] [--cost]

Every request has a system text of its own, so that no prompt is cached. Per server and number of clients: time to
first token, gaps between tokens (p50, p95, largest), and new tokens per second over all clients; medians of the
repeats, and ours over theirs. `--gap`: what a running stream does to another's first token, and what a 700-word
prompt does to a running stream. `--cost`: one slot over HTTP beside the bare engine.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.pull import ensure
from tests.bench.checkpoint import float32_checkpoint
from tests.bench.decode import ours

PROMPT_TOKENS = 12
QUESTION = "Tell me a long story about a fox and a crow."
CHAT = "/v1/chat/completions"
WORDS = [
    "the",
    "fox",
    "went",
    "over",
    "a",
    "hill",
    "and",
    "saw",
    "one",
    "crow",
    "with",
    "some",
    "cheese",
    "in",
    "an",
    "old",
    "tree",
]
SERVERS = ("mlxcel", "mlx_lm")


@dataclass
class Stream:
    """When one answer was asked for, and when each of its tokens came."""

    asked_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@contextmanager
def running(
    server: str, model: Path, num_slots: int, *flags: str, path: str = CHAT, first: object = None
) -> Iterator[str]:
    """The server's address while it runs, once it has answered a request: the `first` at `path`, if there is one;
    `flags` are further ones of it.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    commands = {
        "mlxcel": [
            *("mlxcel_cli.main", "serve", str(model), "--port", port),
            *("--parallel", str(num_slots), "--kv-unified"),
        ],
        "mlx_lm": ["mlx_lm.server", "--model", str(model), "--port", port],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *commands[server], *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                first = first or body("warm up", 2)
                httpx2.post(f"{address}{path}", json=first, timeout=120).raise_for_status()
                break
            except httpx2.HTTPError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def body(system: str, num_new: int, question: str = QUESTION) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": num_new, "temperature": 0, "stream": True}


async def ask(
    client: httpx2.AsyncClient, asked: dict[str, object], started: asyncio.Event | None = None
) -> Stream:
    """Stream one answer; `started` is set at its third token."""
    stream = Stream(time.perf_counter())
    async with client.stream("POST", CHAT, json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line.removeprefix("data: "))["choices"][:1]
            if delta and delta[0]["delta"].get("content"):
                stream.tokens_s.append(time.perf_counter())
                if started is not None and len(stream.tokens_s) == 3:
                    started.set()
    return stream


def crowd(address: str, num_clients: int, num_new: int, salt: str) -> dict[str, float]:
    """Figures of `num_clients` requests sent at once."""

    async def run() -> list[Stream]:
        async with httpx2.AsyncClient(base_url=address, timeout=None) as client:
            texts = [f"You are storyteller {salt}{i}. Be vivid." for i in range(num_clients)]
            return await asyncio.gather(*(ask(client, body(text, num_new)) for text in texts))

    streams = asyncio.run(run())
    gaps_s = sorted(gap for stream in streams for gap in stream.gaps_s)
    took_s = max(stream.tokens_s[-1] for stream in streams) - min(stream.asked_s for stream in streams)
    return {
        "ttft p50 s": statistics.median(stream.first_s for stream in streams),
        "gap p50 s": statistics.median(gaps_s),
        "gap p95 s": gaps_s[int(0.95 * (len(gaps_s) - 1))],
        "gap max s": gaps_s[-1],
        "tokens/s": sum(len(stream.tokens_s) for stream in streams) / took_s,
    }


def disturbance(address: str, salt: str) -> dict[str, float]:
    """First token of a short request while idle and while a stream runs; the gap a 700-word prompt makes."""

    async def run() -> dict[str, float]:
        async with httpx2.AsyncClient(base_url=address, timeout=None) as client:
            idle = await ask(client, body(f"Idle {salt}.", 2))
            started = asyncio.Event()
            stream = asyncio.ensure_future(ask(client, body(f"Stream {salt}.", 40), started))
            await started.wait()
            busy = await ask(client, body(f"Busy {salt}.", 2))
            await stream
            started = asyncio.Event()
            stream = asyncio.ensure_future(ask(client, body(f"Victim {salt}.", 60), started))
            await started.wait()
            words = " ".join(WORDS[(7 * i + i // 5) % len(WORDS)] for i in range(700))
            long = asyncio.ensure_future(ask(client, body(f"Long {salt}.", 2, words)))
            victim = await stream
            await long
            gaps_s = victim.gaps_s
        return {
            "idle ttft s": idle.first_s,
            "busy ttft s": busy.first_s,
            "step s": statistics.median(gaps_s),
            "largest gap s": max(gaps_s),
        }

    return asyncio.run(run())


def cost(model: Path, num_new: int, repeats: int) -> None:
    """Decode rate over HTTP at one slot beside the bare engine on the same checkpoint."""
    engine = Engine.open(EngineConfig(model=model, no_prompt_cache=True))
    prompt = [(7 * i + 3) % engine.vocab_size for i in range(PROMPT_TOKENS)]
    bare, served = [], []
    with running("mlxcel", model, 1) as address:
        for repeat in range(repeats):
            bare.append(ours(engine, PROMPT_TOKENS, num_new, 1)[1])
            asked = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True, "seed": repeat}
            answer = httpx2.post(f"{address}/v1/completions", json=asked, timeout=None).json()
            served.append(answer["timings"]["predicted_per_second"])
    mid, over = statistics.median(bare), statistics.median(served)
    print(
        f"decode, 1 row: bare engine {mid:.2f} tokens/s, over HTTP at one slot {over:.2f}, ratio {over / mid:.3f}"
    )


def show(title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    """Medians of both servers, and ours over theirs."""
    print(f"\n{title}\n{'':16}{'mlxcel':>10}{'mlx_lm':>10}{'ratio':>8}")
    for name in runs[SERVERS[0]][0]:
        one, other = (statistics.median(run[name] for run in runs[server]) for server in SERVERS)
        print(f"{name:16}{one:10.3f}{other:10.3f}{one / other if other else 0:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gap", action="store_true")
    parser.add_argument("--cost", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = float32_checkpoint(ensure(asked.model), Path(folder))
        slots = max([4, *asked.clients])
        crowds: dict[int, dict[str, list[dict[str, float]]]] = {n: {s: [] for s in SERVERS} for n in asked.clients}
        gaps: dict[str, list[dict[str, float]]] = {server: [] for server in SERVERS}
        for repeat in range(asked.repeats):
            for server in SERVERS:
                with running(server, model, slots) as address:
                    for num_clients in asked.clients:
                        salt = f"{repeat}-{num_clients}-"
                        crowds[num_clients][server].append(crowd(address, num_clients, asked.new, salt))
                    if asked.gap:
                        gaps[server].append(disturbance(address, str(repeat)))
        for num_clients, runs in crowds.items():
            show(f"{num_clients} clients, {asked.new} new tokens each", runs)
        if asked.gap:
            show("one stream disturbed", gaps)
        if asked.cost:
            cost(model, asked.new, asked.repeats)


if __name__ == "__main__":
    main()
