"""One line of log for each request: how much was asked and answered, in what time, and why it ended.

No word of prompt or answer is in it, and no header and no query, since they may hold secrets. Knows no dialect.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import reason_of, status_of
from server.generate import Usage
from server.sse import ClientGone
from server.validate import MAX_ECHOED

log = logging.getLogger(__name__)

CLIENT_GONE = "client_gone"
UNFINISHED = "unfinished"  # the server itself let go of it


@dataclass(slots=True)
class Record:
    """What is known of one request; routes fill it. `usage` is the answer's own, and grows with it."""

    method: str
    route: str
    model: str
    id: str = ""
    user: str = ""
    usage: Usage | None = None
    status: int = 0
    fault: str = ""
    arrived_s: float = field(default_factory=time.perf_counter)

    def failed(self, error: Exception) -> None:
        """The request ended by `error`, or by its client's leaving."""
        if isinstance(error, ClientGone):
            self.fault = CLIENT_GONE
            return
        self.fault = reason_of(error)
        self.status = self.status or status_of(error)

    @property
    def reason(self) -> str:
        """Why the request ended: how its choices did, or an error's code; empty where nothing is to be said."""
        if self.fault or self.usage is None:
            return self.fault
        return ",".join(dict.fromkeys(self.usage.reasons)) or UNFINISHED

    def fields(self) -> dict[str, Any]:
        """What the log says, by its names there; what there is no value for is left out."""
        fields: dict[str, Any] = {
            "id": self.id,
            "route": f"{self.method} {self.route}",
            "model": self.model,
            "user": self.user,
            "status": self.status,
            "reason": self.reason,
        }
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["cached_tokens"] = self.usage.cached_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
            if self.usage.first_token_s:
                fields["ttft_ms"] = self._ms(self.usage.first_token_s)
        fields["total_ms"] = self._ms(time.perf_counter())
        return {name: value for name, value in fields.items() if value != ""}

    def _ms(self, now_s: float) -> float:
        return round((now_s - self.arrived_s) * 1000, 1)


def record_of(request: Request) -> Record:
    record: Record = request.scope["record"]
    return record


class Recorded:
    """ASGI middleware: gives each request its record and logs it at the end, however that comes.

    What only looks (GET) is of interest to nobody but a debugger.
    """

    def __init__(self, app: ASGIApp, model: str) -> None:
        self._app = app
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["record"] = Record(scope["method"], scope["path"][:MAX_ECHOED], self._model)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            record.failed(error)
            raise
        finally:
            level = logging.DEBUG if record.method == "GET" else logging.INFO
            log.log(level, "request", extra={"fields": record.fields()})
