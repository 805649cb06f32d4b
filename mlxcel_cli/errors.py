"""What can go wrong on the command line, beside what the engine's own tree names.

MlxcelError
├── UserError
│   ├── WrongUsage          flags that do not go together: exit code 2
│   └── Refused             a server will not do this (4xx, 501); `status` and `code` as it said
│       └── NoTemplate      the model has no chat template: complete text instead
└── ServerFault             a server could not do it (5xx), or an error after the answer had begun
    ├── ServerBusy          503: full, or still loading
    ├── NoAnswer            what it sent is no answer of this API
    ├── EngineGone          503: its model did not load, or its engine has ended
    └── ServerGone          nobody answers at the address, or the answer broke off
"""

from engine.errors import MlxcelError, UserError


class WrongUsage(UserError):
    """Each flag is fine alone; together they mean nothing."""


class Refused(UserError):
    """The server will not do this; `status` and `code` are what it said."""

    def __init__(self, message: str, *, status: int, code: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class NoTemplate(Refused):
    """The model has no chat template."""


class ServerFault(MlxcelError):
    """The server could not do it; the request itself may be fine."""


class ServerBusy(ServerFault):
    """The server has no room now, or its model is not there yet."""


class NoAnswer(ServerFault):
    """The server sent what no answer is: `what` says what that was. Never its text, which may hold anything."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the server sent what no answer is: {what}", hint="is it an OpenAI-compatible server?")


class EngineGone(ServerFault):
    """The server's model did not load, or its engine has ended: nothing will be answered any more."""


class ServerGone(ServerFault):
    """Nobody answers at the address, or the answer broke off."""
