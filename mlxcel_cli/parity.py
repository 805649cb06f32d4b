"""The same requests through every front of the program, and where their answers differ.

The reference is `engine.direct`, run as a program of its own: no scheduler, no server. The other fronts are the
server in this process, as `run` and `generate` use it, and `mlxcel serve` on a socket, at one slot and at four,
alone and beside other requests, computed and taken from the prompt cache. How an answer is made is not known here.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.config import GREEDY, EngineConfig
from engine.errors import MlxcelError
from mlxcel_cli.client import Client
from mlxcel_cli.errors import ServerBusy, ServerFault, ServerGone
from mlxcel_cli.pieces import End, Piece, Reasoning, Text
from mlxcel_cli.transport import InProcess
from server.config import ServerConfig

QUESTION = "What is the capital of France?"
TEXT = (  # longer than a block of the prompt cache in any vocabulary
    "Once upon a time there was a small village between two hills, where nobody had ever seen the sea, and where "
    "an old miller told every child who would listen that he had once"
)
NEIGHBOURS = ("The history of the sea is", "1, 2, 3, 4, 5, 6, 7,", "def quicksort(numbers):")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {  # nothing is left to the defaults, which differ from front to front
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "seed": 7,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
}
READY_S, POLL_S = 300.0, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One request: a chat turn or a raw text, and how to sample."""

    name: str
    is_chat: bool
    sampling: Mapping[str, Any]
    max_tokens: int

    def job(self) -> dict[str, Any]:
        """The case as `engine.direct` takes it."""
        prompt = {"messages": [{"role": "user", "content": QUESTION}]} if self.is_chat else {"prompt": TEXT}
        return {**prompt, "max_tokens": self.max_tokens, "sampling": dict(self.sampling)}

    def pieces(self, client: Client, more: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """The answer of `client`; `more` are further fields of the request."""
        asked = {**self.sampling, "max_tokens": self.max_tokens, **more}
        if self.is_chat:
            return client.chat([{"role": "user", "content": QUESTION}], asked)
        return client.complete(TEXT, asked)


@dataclass(frozen=True, slots=True)
class Said:
    """What one front answered: the text, why it ended and how many tokens it took; or the error.

    `cached_tokens` of the prompt were not computed.
    """

    text: str = ""
    finish_reason: str = ""
    completion_tokens: int = 0
    error: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case on one front beside the reference."""

    case: str
    arm: str
    identical: bool
    difference: str = ""
    cached_tokens: int = 0


@dataclass(slots=True)
class Report:
    """All comparisons, in the order they were made."""

    model: str
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return all(one.identical for one in self.comparisons)

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "identical": self.identical,
            "comparisons": [asdict(one) for one in self.comparisons],
        }


def cases(max_tokens: int) -> list[Case]:
    """Every sampling on raw text and on a chat turn."""
    return [
        Case(f"{kind}, {name}", kind == "chat", sampling, max_tokens)
        for name, sampling in SAMPLINGS.items()
        for kind in ("text", "chat")
    ]


async def compare(model: str, path: Path, max_tokens: int, *, tell: Callable[[str], None]) -> Report:
    """Run every case on every front; `tell` hears what is being done."""
    report = Report(model)
    tell("direct: engine.direct")
    asked = cases(max_tokens)
    reference = dict(zip(asked, await _direct(path, asked), strict=True))
    if all(said.error for said in reference.values()):
        raise ServerFault(f"the reference could not run: {next(iter(reference.values())).error}")
    asked = [case for case in asked if not reference[case].error]  # a base model answers no chat

    async def arm(
        name: str, client: Client, *, neighbours: int = 0, more: Callable[[Case], Mapping[str, Any]] = lambda _: {}
    ) -> None:
        for case in asked:
            front = name.format(command="run" if case.is_chat else "generate")
            tell(f"{front}: {case.name}")
            said = await _beside(client, neighbours, case, more(case))
            difference = first_difference(reference[case], said)
            report.comparisons.append(Comparison(case.name, front, not difference, difference, said.cached_tokens))

    async with _in_process(model, path) as client:
        await arm("{command}, in process", client)
    async with _served(path, 1) as client:
        await arm("server, 1 slot", client, more=lambda _: {"cache_prompt": False})
        for front in ("server, 1 slot, cache miss", "server, 1 slot, cache hit"):
            await arm(front, client, more=lambda case: {"cache_salt": case.name})
    async with _served(path, 4) as client:
        await arm("server, 4 slots, alone", client)
        await arm("server, 4 slots, 3 others", client, neighbours=3)
        can_be_paged = (await client.props()).get("storage_backend") == "paged"
    if can_be_paged:
        async with _served(path, 1, "--decode-storage-backend", "paged") as client:
            await arm("server, 1 slot, paged", client, more=lambda _: {"cache_prompt": False})
            for front in ("server, 1 slot, paged, cache miss", "server, 1 slot, paged, cache hit"):
                await arm(front, client, more=lambda case: {"cache_salt": case.name})
    return report


def first_difference(reference: Said, said: Said) -> str:
    """Where `said` leaves `reference`, in words; an empty string where it does not."""
    if said.error:
        return said.error
    if said.text != reference.text:
        pairs = enumerate(zip(reference.text, said.text, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(reference.text), len(said.text)))
        return f"at character {at}: {reference.text[at : at + 16]!r} became {said.text[at : at + 16]!r}"
    for name in ("finish_reason", "completion_tokens"):
        expected, got = getattr(reference, name), getattr(said, name)
        if got != expected:
            return f"{name}: {expected} became {got}"
    return ""


async def _direct(path: Path, asked: Sequence[Case]) -> list[Said]:
    """The reference's answers, from a process of its own."""
    job = json.dumps({"model": str(path), "cases": [case.job() for case in asked]})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine.direct", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await process.communicate(job.encode())
    if process.returncode != 0:
        raise ServerFault("the reference, engine.direct, failed")
    return [Said(**said) for said in json.loads(answer)]


@asynccontextmanager
async def _in_process(model: str, path: Path, num_slots: int = 1) -> AsyncIterator[Client]:
    """The server in this process."""
    from server.app import make_app

    engine = EngineConfig(model=path, parallel=num_slots, fallback_sampling=GREEDY)
    app = make_app(ServerConfig(engine=engine, model_id=model))
    async with Client(InProcess(app), "http://localhost") as client:
        yield client


@asynccontextmanager
async def _served(path: Path, num_slots: int, *flags: str) -> AsyncIterator[Client]:
    """`mlxcel serve` on a unix socket, in a process of its own, with further `flags`."""
    with tempfile.TemporaryDirectory(prefix="mlxcel-") as folder:
        address = str(Path(folder) / "parity.sock")
        command = ["-m", "mlxcel_cli.main", "serve", str(path), "--host", address]
        command += ["--parallel", str(num_slots), "--kv-unified", *flags]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with Client.to(address) as client:
                await _ready(client, process)
                yield client
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _ready(client: Client, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(READY_S):
        while process.returncode is None:
            with suppress(ServerGone, ServerBusy):
                await client.health()
                return
            await asyncio.sleep(POLL_S)
    raise ServerFault(f"mlxcel serve ended with code {process.returncode} before its model was loaded")


async def _beside(client: Client, neighbours: int, case: Case, more: Mapping[str, Any]) -> Said:
    """What `client` answers to `case` with the further fields `more` while `neighbours` other requests run."""
    async with AsyncExitStack() as running:
        for text in NEIGHBOURS[:neighbours]:
            asked = {"max_tokens": 100_000, "ignore_eos": True, "temperature": 1.0}
            stream = await running.enter_async_context(aclosing(client.complete(text, asked)))
            async for piece in stream:
                if isinstance(piece, Text):
                    break
        return await _said(case.pieces(client, more))


async def _said(pieces: AsyncGenerator[Piece, None]) -> Said:
    text, end = "", End("")
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Text | Reasoning):
                    text += piece.text
                elif isinstance(piece, End):
                    end = piece
    except MlxcelError as error:
        return Said(error=str(error))
    cached = (end.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Said(text, end.finish_reason, end.usage.get("completion_tokens", 0), cached_tokens=cached)
