"""Errors of the HTTP side, and the one table from error type to status, type and code.

OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. llama-server's, on its own routes:
`{"error": {"code", "message", "type"}}`, where the code is the status.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from engine.errors import (
    ContextLengthExceeded,
    EngineFault,
    EngineStopped,
    MlxcelError,
    ModelError,
    NeverFits,
    NoChatTemplate,
    QueueFull,
    RequestError,
    StepFailed,
    UserError,
)

RETRY_AFTER_S = 1


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class NotSupported(RequestError):
    """A kind of input that nothing here can take, such as an image."""


class BodyTooLarge(RequestError):
    """The request's body is larger than any is allowed to be."""


class ModelLoading(EngineFault):
    """The model is not there yet, and the request does not wait for it."""


class EngineStalled(EngineFault):
    """Requests run, and nothing has come of them for too long."""


class NoFreeSlot(EngineFault):
    """Every slot is taken, and the client wanted to know."""


@dataclass(frozen=True, slots=True)
class _Face:
    status: int
    type: str
    code: str | None = None


_INVALID = "invalid_request_error"

# The first entry that the error is an instance of applies.
_TABLE: tuple[tuple[type[Exception], _Face], ...] = (
    (UnknownModel, _Face(404, _INVALID, "model_not_found")),
    (NotSupported, _Face(501, "not_supported_error")),
    (BodyTooLarge, _Face(413, _INVALID, "body_too_large")),
    (ContextLengthExceeded, _Face(400, _INVALID, "context_length_exceeded")),
    (NeverFits, _Face(400, _INVALID, "memory_exceeded")),
    (NoChatTemplate, _Face(400, _INVALID, "no_chat_template")),
    (ModelError, _Face(503, "server_error", "model_not_loaded")),
    (UserError, _Face(400, _INVALID)),
    (QueueFull, _Face(503, "server_error", "queue_full")),
    (EngineStopped, _Face(503, "server_error", "engine_stopped")),
    (StepFailed, _Face(500, "server_error", "step_failed")),
    (ModelLoading, _Face(503, "server_error", "model_loading")),
    (EngineStalled, _Face(503, "server_error", "engine_stalled")),
    (NoFreeSlot, _Face(503, "server_error", "no_free_slot")),
    (EngineFault, _Face(500, "server_error")),
)
_INTERNAL = _Face(500, "server_error", "internal_error")

# What llama-server calls a status, where that is not `invalid_request_error` or `server_error`.
_NATIVE_TYPES = {404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


def _face(error: Exception) -> _Face:
    return next((face for kind, face in _TABLE if isinstance(error, kind)), _INTERNAL)


def status_of(error: Exception) -> int:
    """The HTTP status that answers `error`."""
    return _face(error).status


def reason_of(error: Exception) -> str:
    """One word for `error`: its code or, where it has none, its type."""
    return _face(error).code or _face(error).type


def error_body(error: Exception) -> dict[str, Any]:
    """The error as clients of the OpenAI dialect expect it. What is not one of ours is not told."""
    face = _face(error)
    param = error.param or None if isinstance(error, RequestError) else None
    return {"error": {"message": _message(error), "type": face.type, "param": param, "code": face.code}}


def native_error_body(message: str, status: int) -> dict[str, Any]:
    """An error as clients of llama-server expect it."""
    kind = _NATIVE_TYPES.get(status, _INVALID if status < 500 else "server_error")
    return {"error": {"code": status, "message": message, "type": kind}}


def _message(error: Exception) -> str:
    if not isinstance(error, MlxcelError):
        return "an internal error; the server's log says which"
    return f"{error}; {error.hint}" if error.hint else str(error)


def error_response(error: Exception, headers: dict[str, str] | None = None, *, native: bool = False) -> Response:
    """The answer to `error`; `native`: in llama-server's shape."""
    status = status_of(error)
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    body = native_error_body(_message(error), status) if native else error_body(error)
    return json_response(body, status, {**retry, **(headers or {})})


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
