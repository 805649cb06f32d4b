"""One request as a router follows it: what its client has by now, and how somebody else goes on from there."""

import asyncio
import dataclasses
from dataclasses import dataclass, field

from engine.loop import Ticket
from engine.request import Output, Progress, Request, Resumed, Row, TokenLogprob
from server.roles import wire


@dataclass(eq=False, slots=True)
class Job:
    """`row` stands for the request in events, `ticket` for it at whoever submitted it. `number` is its rank."""

    ticket: Ticket
    row: Row
    number: int
    task: "asyncio.Task[None] | None" = None
    stored_tokens: int = 0
    num_cached: int = 0
    cache_miss: int | None = None
    prompt_ms: float = 0.0
    first_token_s: float = 0.0
    num_lost: int = 0
    _drawn: list[TokenLogprob] = field(default_factory=list)
    _num_released: int = 0
    _mu: float | None = None

    @property
    def request(self) -> Request:
        return self.row.request

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer, as far as that is known."""
        return (*self.request.prompt, *self.row.output)

    def progress(self, stored: wire.Stored) -> Progress:
        self.stored_tokens = stored.done
        return Progress(self.row, stored.done, stored.total)

    def output(self, said: wire.Said, now_s: float) -> Output:
        """Take a token, and note what whoever goes on has to know of it."""
        if not self.row.output:
            self.first_token_s = now_s
        self.row.output.append(said.token)
        if said.drawn is not None:
            self._drawn.append(said.drawn)
        self._num_released += len(said.logprobs)
        self._mu = said.mu
        return said.output(self.row)

    def handed(self, over: wire.HandedOver) -> None:
        """Note what a prefill node tells of the prompt; of the first one, for others compute it anew."""
        if len(self.row.output) == 1:
            self.num_cached, self.cache_miss, self.prompt_ms = over.num_cached, over.cache_miss, over.prompt_ms

    def start(self, number: int, now_s: float, *, hands_over: bool, fetch: wire.Fetch | None = None) -> wire.Start:
        """What a node is to be told to go on from here."""
        request = self.request
        if self.row.output:
            resumed = Resumed(
                tuple(self.row.output),
                tuple(self._drawn[self._num_released :]),
                self._mu,
                self.num_cached,
                self.cache_miss,
                self.prompt_ms,
                (now_s - self.first_token_s) * 1000,
            )
            request = dataclasses.replace(request, resumed=resumed)
        request = dataclasses.replace(request, hands_over=hands_over)
        return wire.Start(number, request, wire.begun_of(request), fetch)
