"""Errors of the HTTP side, and the one table from error type to status, type and code.

Each dialect writes an error down in its own shape. OpenAI: `{"error": {"message", "type", "param", "code"}}`.
Anthropic: `{"type": "error", "error": {"type", "message"}}`. llama-server: `{"error": {"code", "message",
"type"}}`, where the code is the status.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from starlette.responses import Response

from engine.errors import (
    AdapterError,
    AdapterNotFound,
    AdapterTaken,
    ContextLengthExceeded,
    EmbeddingsOnly,
    EngineFault,
    EngineStopped,
    MlxcelError,
    ModelError,
    NeverFits,
    NoChatTemplate,
    NoEmbeddings,
    QueueFull,
    RequestError,
    StepFailed,
    UserError,
)

RETRY_AFTER_S = 1
NO_NODE = "none of the router's nodes is up"

Shape = Literal["openai", "anthropic", "llama"]

# Paths whose errors have another shape than OpenAI's; of those that begin alike as well.
_SHAPES: Mapping[str, Shape] = {
    "/props": "llama",
    "/slots": "llama",
    "/completion": "llama",
    "/tokenize": "llama",
    "/detokenize": "llama",
    "/apply-template": "llama",
    "/v1/messages": "anthropic",
}


def shape_of(path: str) -> Shape:
    """The shape of the errors of the route at `path`, or of one that would be below it."""
    return next(
        (shape for route, shape in _SHAPES.items() if path == route or path.startswith(f"{route}/")), "openai"
    )


class UnknownModel(RequestError):
    """The request names a model that is not served."""


class NotSupported(RequestError):
    """A kind of input that nothing here can take, such as an image."""


class BodyTooLarge(RequestError):
    """The request's body is larger than any is allowed to be."""


class Unauthorized(RequestError):
    """The request carries no API key, or one that is none of the server's."""


class Foreign(RequestError):
    """The request was made for another host, or by a page of another origin."""


class UnknownRequest(RequestError):
    """No request of this id runs or waits."""


class UnknownResponse(RequestError):
    """No response of this id is kept, or no longer."""


class NoRoute(RequestError):
    """Nothing is at this path, or not for this method."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Cancelled(RequestError):
    """The request was ended from elsewhere."""


class TimedOut(EngineFault):
    """The request took longer than any may."""


class ModelLoading(EngineFault):
    """The model is not there yet, and the request does not wait for it."""


class EngineStalled(EngineFault):
    """Requests run, and nothing has come of them for too long."""


class NoNode(EngineFault):
    """A router has no node that could run the request."""


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
    (AdapterNotFound, _Face(404, _INVALID, "model_not_found")),
    (AdapterTaken, _Face(409, _INVALID, "adapter_taken")),
    (AdapterError, _Face(400, _INVALID, "adapter_refused")),
    (UnknownRequest, _Face(404, _INVALID, "request_not_found")),
    (UnknownResponse, _Face(404, _INVALID, "response_not_found")),
    (NotSupported, _Face(501, "not_supported_error")),
    (BodyTooLarge, _Face(413, _INVALID, "body_too_large")),
    (Unauthorized, _Face(401, _INVALID, "invalid_api_key")),
    (Foreign, _Face(403, _INVALID, "foreign_origin")),
    (Cancelled, _Face(499, _INVALID, "request_cancelled")),
    (ContextLengthExceeded, _Face(400, _INVALID, "context_length_exceeded")),
    (NeverFits, _Face(400, _INVALID, "memory_exceeded")),
    (NoChatTemplate, _Face(400, _INVALID, "no_chat_template")),
    (NoEmbeddings, _Face(501, "not_supported_error", "no_embeddings")),
    (EmbeddingsOnly, _Face(501, "not_supported_error", "embeddings_only")),
    (ModelError, _Face(503, "server_error", "model_not_loaded")),
    (UserError, _Face(400, _INVALID)),
    (QueueFull, _Face(503, "server_error", "queue_full")),
    (EngineStopped, _Face(503, "server_error", "engine_stopped")),
    (StepFailed, _Face(500, "server_error", "step_failed")),
    (TimedOut, _Face(504, "server_error", "request_timeout")),
    (ModelLoading, _Face(503, "server_error", "model_loading")),
    (EngineStalled, _Face(503, "server_error", "engine_stalled")),
    (NoNode, _Face(503, "server_error", "no_node")),
    (NoFreeSlot, _Face(503, "server_error", "no_free_slot")),
    (EngineFault, _Face(500, "server_error")),
)
_INTERNAL = _Face(500, "server_error", "internal_error")

# What a dialect calls a status; `_REST` is for what it has no word of its own for, below 500 and from there on.
_TYPES: Mapping[Shape, Mapping[int, str]] = {
    "anthropic": {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        501: "not_supported_error",
        503: "overloaded_error",
        504: "timeout_error",
    },
    "llama": {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        501: "not_supported_error",
        503: "unavailable_error",
    },
}
_REST: Mapping[Shape, tuple[str, str]] = {
    "anthropic": (_INVALID, "api_error"),
    "llama": (_INVALID, "server_error"),
}


def _face(error: Exception) -> _Face:
    if isinstance(error, NoRoute):
        return _Face(error.status, _INVALID, "not_found" if error.status == 404 else None)
    return next((face for kind, face in _TABLE if isinstance(error, kind)), _INTERNAL)


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of the table: the errors of a kind, their status and code, and their type in each dialect."""

    kind: type[Exception]
    status: int
    code: str | None
    types: Mapping[Shape, str]


def known_errors() -> tuple[Known, ...]:
    """The table and what stands beside it, by status, for those who write it down."""
    entries: list[tuple[type[Exception], _Face]] = [*_TABLE, (Exception, _INTERNAL)]
    entries += [(NoRoute, _face(NoRoute("", status))) for status in (404, 405)]
    entries.sort(key=lambda entry: entry[1].status)
    shapes = get_args(Shape)
    return tuple(
        Known(kind, face.status, face.code, {shape: _type(face, shape) for shape in shapes})
        for kind, face in entries
    )


def status_of(error: Exception) -> int:
    """The HTTP status that answers `error`."""
    return _face(error).status


def reason_of(error: Exception) -> str:
    """One word for `error`: its code or, where it has none, its type."""
    return _face(error).code or _face(error).type


def error_body(error: Exception, shape: Shape = "openai") -> dict[str, Any]:
    """The error as clients of the dialect expect it. What is not one of ours is not told."""
    face = _face(error)
    message, kind = _message(error), _type(face, shape)
    if shape == "openai":
        param = error.param or None if isinstance(error, RequestError) else None
        return {"error": {"message": message, "type": kind, "param": param, "code": face.code}}
    if shape == "anthropic":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"code": face.status, "message": message, "type": kind}}


def _type(face: _Face, shape: Shape) -> str:
    """What the dialect calls it."""
    if shape == "openai":
        return face.type
    return _TYPES[shape].get(face.status, _REST[shape][face.status >= 500])


def _message(error: Exception) -> str:
    if not isinstance(error, MlxcelError):
        return "an internal error; the server's log says which"
    return f"{error}; {error.hint}" if error.hint else str(error)


def error_response(
    error: Exception, headers: Mapping[str, str] | None = None, *, shape: Shape = "openai"
) -> Response:
    """The answer to `error`, in the dialect's shape."""
    status = status_of(error)
    own = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    if status == 401:
        own["www-authenticate"] = "Bearer"
    if status == 501:  # else OpenAI's and Anthropic's clients take it for a fault that passes
        own["x-should-retry"] = "false"
    return json_response(error_body(error, shape), status, {**own, **(headers or {})})


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
