"""Sends conversations to a server and records what becomes of each request.

Closed loop: so many clients, each of which sends its next request when it has its answer. Open loop: conversations
begin at drawn moments, whatever the server does; what is late through a server that is slow counts as waiting
(no coordinated omission, as Gil Tene calls it), since it is measured from the moment that was drawn.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engine.errors import MlxcelError
from mlxcel_cli.bench.mixes import Conversation
from mlxcel_cli.bench.record import Record
from mlxcel_cli.client import Client
from mlxcel_cli.errors import EngineGone, NoAnswer, Refused, ServerBusy, ServerGone
from mlxcel_cli.pieces import End, Reasoning, Text

Now = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


def poisson(rate: float, num: int, draw: random.Random) -> list[float]:
    """`num` moments in seconds from 0 on, at `rate` a second on average, each independent of the others."""
    moments, at_s = [], 0.0
    for _ in range(num):
        at_s += draw.expovariate(rate)
        moments.append(at_s)
    return moments


@dataclass(slots=True)
class Load:
    """Requests to one server. `asked` are fields of each request; `timeout_s` is what one may take, 0: anything.

    `told` hears of each record when it is whole.
    """

    client: Client
    asked: Mapping[str, Any]
    timeout_s: float = 0.0
    told: Callable[[Record], None] = lambda record: None
    now: Now = time.perf_counter
    sleep: Sleep = asyncio.sleep
    records: list[Record] = field(default_factory=list)

    async def closed(self, conversations: Sequence[Conversation], num_clients: int) -> list[Record]:
        """Every conversation, by `num_clients` clients."""
        waiting = iter(conversations)

        async def client() -> None:
            for conversation in waiting:
                await self._converse(conversation, self.now())

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return self.records

    async def open(self, conversations: Sequence[Conversation], moments_s: Sequence[float]) -> list[Record]:
        """Every conversation at its moment, in seconds from now. Later turns follow the ones before."""
        began_s = self.now()
        async with asyncio.TaskGroup() as running:
            for conversation, moment_s in zip(conversations, moments_s, strict=True):
                due_s = began_s + moment_s
                if (wait_s := due_s - self.now()) > 0:
                    await self.sleep(wait_s)
                running.create_task(self._converse(conversation, due_s))
        return self.records

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        """Each turn with those before; one that fails ends the conversation."""
        messages = [{"role": "system", "content": conversation.system}]
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            record = Record(due_s, sent_s=self.now())
            text = await self._ask(messages, record)
            self.records.append(record)
            self.told(record)
            if record.error:
                return
            messages.append({"role": "assistant", "content": text})
            due_s = record.ended_s

    async def _ask(self, messages: Sequence[Mapping[str, str]], record: Record) -> str:
        """The answer's text; `record` has what became of it."""
        text = ""
        try:
            async with asyncio.timeout(self.timeout_s or None):
                async with aclosing(self.client.chat(messages, self.asked)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Text | Reasoning):
                            record.pieces_s.append(self.now())
                            text += piece.text if isinstance(piece, Text) else ""
                        elif isinstance(piece, End):
                            record.usage = piece.usage
        except MlxcelError as problem:
            record.error = kind_of(problem)
        except TimeoutError:
            record.error = "timeout"
        record.ended_s = self.now()
        return text


def kind_of(problem: MlxcelError) -> str:
    """What is counted together."""
    match problem:
        case Refused():
            return f"refused ({problem.status})"
        case ServerBusy():
            return "busy (503)"
        case NoAnswer():
            return "no answer of this API"
        case EngineGone():
            return "model gone"
        case ServerGone():
            return "no connection" if problem.hint else "broken off"
        case _:
            return "server error"
