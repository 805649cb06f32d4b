"""What happens to each request, told to whoever listens: ids, counts and times, and no text.

A loop tells its Watch where it counts; without a listener nothing is made of it. A listener is called on the
thread that tells, once for what came of a tick, and must not block. Knows no HTTP, no format and no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.metrics import Outcome
from engine.request import Event, Output, Progress

if TYPE_CHECKING:
    from engine.loop import Ticket

Stage = Literal["queued", "started", "piece", "first_token", "preempted", "ended"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One stage that a request has come to, at a time of the loop's clock. `task` numbers all requests.

    By then `stored_tokens` of its `prompt_tokens` were there, `cached_tokens` of them not computed for it, and it
    had so many new tokens; `outcome` is that of its end.
    """

    stage: Stage
    task: int
    id: str
    choice: int
    at_s: float
    prompt_tokens: int
    stored_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    outcome: Outcome | None = None


class Watch:
    """Tells `listener`, while there is one."""

    def __init__(self) -> None:
        self.listener: Callable[[Sequence[Moment]], None] | None = None

    def queued(self, ticket: "Ticket", now_s: float) -> None:
        """A request was taken."""
        if self.listener is not None:
            self._tell([_moment("queued", ticket, now_s)])

    def started(self, tickets: Sequence["Ticket"], now_s: float) -> None:
        """These requests are about to run for the first time."""
        if self.listener is not None:
            self._tell([_moment("started", ticket, now_s) for ticket in tickets])

    def ran(self, happened: Sequence[tuple["Ticket", Event]], preempted: Sequence["Ticket"], now_s: float) -> None:
        """This came of a tick; told before its tokens are counted, so that the first is known as such."""
        if self.listener is None:
            return
        moments = [_moment("preempted", ticket, now_s) for ticket in preempted]
        spoke: set[int] = set()
        for ticket, event in happened:
            if isinstance(event, Progress):
                moments.append(_moment("piece", ticket, now_s, stored=event.done))
            elif isinstance(event, Output) and ticket.times.token_s is None and ticket.number not in spoke:
                spoke.add(ticket.number)
                moments.append(_moment("first_token", ticket, now_s))
        self._tell(moments)

    def ended(self, ticket: "Ticket", outcome: Outcome, now_s: float) -> None:
        """A request is over."""
        if self.listener is not None:
            self._tell([_moment("ended", ticket, now_s, outcome=outcome)])

    def _tell(self, moments: Sequence[Moment]) -> None:
        listener = self.listener  # another thread may take it away
        if moments and listener is not None:
            listener(moments)


def _moment(
    stage: Stage, ticket: "Ticket", now_s: float, *, stored: int | None = None, outcome: Outcome | None = None
) -> Moment:
    request, row = ticket.request, ticket.row
    prompt_tokens = len(request.prompt)
    if stored is None:
        stored = 0 if row is None else row.cursor
    return Moment(
        stage,
        ticket.number,
        request.id,
        request.choice,
        now_s,
        prompt_tokens,
        stored_tokens=min(stored, prompt_tokens),
        cached_tokens=0 if row is None else row.num_cached,
        new_tokens=0 if row is None else len(row.output),
        outcome=outcome,
    )
