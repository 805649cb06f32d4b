"""How fast one model stores prompts and decodes, over sizes of prompts and of batches.

It asks the server in this process as any client would, with `/v1/completions`. A prefill rate is that of all
prompt tokens of a batch, from the first request to the last answer, where each asks for one token alone. A
decode rate is that of the median step while every request of the batch decodes.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.errors import UserError
from mlxcel_cli.bench.mixes import WORDS
from mlxcel_cli.bench.record import Record
from mlxcel_cli.client import Client
from mlxcel_cli.pieces import End, Text
from mlxcel_cli.transport import InProcess
from server.config import ServerConfig

# Below this share of its tokens, a request's pieces of text say too little of its steps.
FEWEST_PIECES = 0.75


@dataclass(slots=True)
class Point:
    """What was measured at one size: tokens a second, one rate for each repeat; `steps_s` of the last repeat."""

    prompt_tokens: int
    batch: int
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is to be measured: every prompt size with every batch size, `repeats` times after `warmup` more."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    warmup: int

    def engine(self, settings: Any, model: Any) -> EngineConfig:
        """The engine's configuration: room for the largest batch, and nothing taken from the prompt cache."""
        fixed = {"parallel": max(self.batches), "kv_unified": True, "no_prompt_cache": True, "adapters": ()}
        config: EngineConfig = settings.engine(model, **fixed)
        return config


@dataclass(frozen=True, slots=True)
class Speed:
    """All points of a model, and what its engine says of how it runs it."""

    model: str
    notes: tuple[str, ...]
    points: tuple[Point, ...]


async def measure(config: ServerConfig, sizes: Sizes, *, tell: Callable[[str], None]) -> Speed:
    """Measure every size in turn, and all of them again for each repeat, so that drift falls on all alike.

    Raises UserError where a size does not fit the model's context.
    """
    points = [Point(prompt, batch) for prompt in sizes.prompts for batch in sizes.batches]
    async with in_process(config) as client:
        (described,) = await _loaded(client)
        meta = described.get("meta") or {}
        longest = max(sizes.prompts) + sizes.new_tokens
        if longest > meta["n_ctx"]:
            raise UserError(
                f"prompt and new tokens are {longest}, and the context is {meta['n_ctx']}",
                hint="measure shorter prompts, or give a larger --ctx-size",
            )
        words = await client.tokens(" ".join(WORDS))
        for repeat in range(-sizes.warmup, sizes.repeats):
            for point in points:
                stage = f"{repeat + 1} of {sizes.repeats}" if repeat >= 0 else "warm-up"
                tell(f"{point.prompt_tokens} prompt tokens, batch of {point.batch}: {stage}")
                kept = point if repeat >= 0 else Point(point.prompt_tokens, point.batch)
                await _measured(client, kept, sizes.new_tokens, words)
        notes = tuple((await client.props()).get("notes", ()))
    return Speed(config.served_name, notes, tuple(points))


@asynccontextmanager
async def in_process(config: ServerConfig) -> AsyncIterator[Client]:
    """A client of the server in this process."""
    from server.app import make_app

    async with Client(InProcess(make_app(config)), "http://localhost") as client:
        yield client


async def _loaded(client: Client) -> list[dict[str, Any]]:
    """What the server says of its model once it is loaded: a request waits for that."""
    async with aclosing(client.complete("1", {"max_tokens": 1})) as pieces:
        async for _ in pieces:
            pass
    return await client.described_models()


async def _measured(client: Client, point: Point, num_new: int, words: Sequence[int]) -> None:
    """Add the rates of one run of each to `point`."""
    stored = await _batch(client, point, 1, words)
    taken_s = max(record.ended_s for record in stored) - min(record.sent_s for record in stored)
    point.prefill.append(point.batch * point.prompt_tokens / taken_s)
    point.steps_s = steps_of(await _batch(client, point, num_new, words))
    point.decode.append(point.batch / statistics.median(point.steps_s))


async def _batch(client: Client, point: Point, num_new: int, words: Sequence[int]) -> list[Record]:
    """As many requests at once as the batch has, each with a prompt of its own: `words`, again and again.

    Behind words come words, so that every step of a model that knows any gives a piece of text to tell it by.
    """
    asked = {"max_tokens": num_new, "temperature": 0, "ignore_eos": True}

    async def ask(row: int) -> Record:
        prompt = [words[(place + 7 * row) % len(words)] for place in range(point.prompt_tokens)]
        now_s = time.perf_counter()
        record = Record(now_s, sent_s=now_s)
        async with aclosing(client.complete(prompt, asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Text):
                    record.pieces_s.append(time.perf_counter())
                elif isinstance(piece, End):
                    record.usage = piece.usage
        record.ended_s = time.perf_counter()
        return record

    return await asyncio.gather(*(ask(row) for row in range(point.batch)))


def steps_of(records: Sequence[Record]) -> list[float]:
    """The seconds of each step in which every request decodes, as their pieces of text tell.

    Where text comes in fewer pieces than there are tokens, which happens in the midst of a character, the mean
    over all tokens of each request stands for its steps.
    """
    begun_s = max((record.pieces_s[0] for record in records if record.pieces_s), default=0.0)
    ended_s = min((record.pieces_s[-1] for record in records if record.pieces_s), default=0.0)
    steps_s: list[float] = []
    for record in records:
        within = [at for at in record.pieces_s if begun_s <= at <= ended_s]
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(within)]
        if gaps_s and len(record.pieces_s) >= FEWEST_PIECES * record.completion_tokens:
            steps_s += gaps_s
        else:
            began_s = record.pieces_s[0] if record.pieces_s else record.sent_s
            steps_s.append((record.ended_s - began_s) / max(record.completion_tokens - 1, 1))
    return steps_s
