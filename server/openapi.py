"""The OpenAPI document of this server, made from the types that bodies are held against.

What a body's type says is its schema. Added to it is what `validate.parse` does for every type: null is "not
given", a field that asks for nothing may be sent, one that clients send as a matter of course is passed over, and
any other is refused. Knows nothing of what is served.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.request import PRIORITIES
from server.adapters import AdapterBody
from server.auth import OPEN_PATHS
from server.bodies import CompletionBody
from server.chat import ChatBody, Message, Tool
from server.embeddings import EmbeddingsBody
from server.errors import Shape, shape_of
from server.items import ResponsesBody
from server.llama import DetokenizeBody, NativeCompletionBody, TemplateBody, TokenizeBody
from server.messages import CountBody, MessagesBody
from server.validate import MEANINGLESS, neutral_of

REFERENCE = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it is for, the body it takes, whether it generates, and what its query may hold.

    An answer that is `endless` goes on until the client leaves; a request that is `prioritized` has an id and a
    priority, as one that generates has.
    """

    summary: str
    body: type[msgspec.Struct] | None = None
    generates: bool = False
    query: tuple[str, ...] = ()
    endless: bool = False
    prioritized: bool = False


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation("the assistant's next turn", ChatBody, generates=True),
    ("POST", "/v1/completions"): Operation("the continuation of a text", CompletionBody, generates=True),
    ("POST", "/v1/embeddings"): Operation("the vectors of texts", EmbeddingsBody, prioritized=True),
    ("POST", "/v1/responses"): Operation("the assistant's next turn, in items", ResponsesBody, generates=True),
    ("GET", "/v1/responses/{id}"): Operation("a response that is kept"),
    ("DELETE", "/v1/responses/{id}"): Operation("forget a response"),
    ("POST", "/v1/messages"): Operation("the assistant's next turn, in blocks", MessagesBody, generates=True),
    ("POST", "/v1/messages/count_tokens"): Operation("how many tokens such a prompt has", CountBody),
    ("GET", "/v1/models"): Operation("what is served"),
    ("GET", "/v1/models/{id}"): Operation("one model that is served"),
    ("GET", "/v1/adapters"): Operation("the adapters that are mounted"),
    ("POST", "/v1/adapters"): Operation("mount an adapter beside a model", AdapterBody),
    ("DELETE", "/v1/adapters/{name}"): Operation("unmount an adapter"),
    ("POST", "/v1/requests/{id}/cancel"): Operation("end a request that runs or waits"),
    ("GET", "/v1/cache/stats"): Operation("what the prompt cache holds", query=("model",)),
    ("GET", "/v1/internal/draft-policy"): Operation(
        "who drafts, how much is accepted, and which widths pay", query=("model",)
    ),
    ("POST", "/v1/cache/reset"): Operation("drop what the prompt cache holds", query=("model",)),
    ("GET", "/health"): Operation("whether the model is there"),
    ("GET", "/health/ready"): Operation("whether tokens come"),
    ("POST", "/completion"): Operation("the continuation of a text", NativeCompletionBody, generates=True),
    ("POST", "/tokenize"): Operation("the tokens of a text", TokenizeBody),
    ("POST", "/detokenize"): Operation("the text of tokens", DetokenizeBody),
    ("POST", "/apply-template"): Operation("the prompt of a conversation", TemplateBody),
    ("GET", "/props"): Operation("what is served, and how", query=("model",)),
    ("GET", "/slots"): Operation("what runs now", query=("fail_on_no_slot", "model")),
    ("GET", "/metrics"): Operation("the engine's numbers, for Prometheus"),
    ("GET", "/events"): Operation("what the engine does, as it does it", query=("model",), endless=True),
    ("GET", "/openapi.json"): Operation("this document"),
}

# Lists whose items stay as they came, since the template reads them, and are held against a type.
ITEMS: Mapping[str, type[msgspec.Struct]] = {"messages": Message, "tools": Tool}

ERRORS: Mapping[Shape, dict[str, Any]] = {
    "openai": {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]},
    "anthropic": {"type": "string", "message": "string"},
    "llama": {"code": "integer", "message": "string", "type": "string"},
}


ROUTER_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/router/stats"): Operation("the nodes, and what they are had to do"),
    ("POST", "/router/nodes/{id}/drain"): Operation("give a node nothing new"),
    ("DELETE", "/router/nodes/{id}/drain"): Operation("let a node take part again"),
}


def document(*, needs_key: bool, is_router: bool = False) -> dict[str, Any]:
    """The document, as OpenAPI 3.1 has it; `needs_key`: requests carry an API key. A router has further routes."""
    operations = {**OPERATIONS, **(ROUTER_OPERATIONS if is_router else {})}
    bodies = sorted(
        {one.body for one in operations.values() if one.body is not None}, key=lambda body: body.__name__
    )
    _, components = msgspec.json.schema_components((*bodies, *ITEMS.values()), ref_template=REFERENCE + "{name}")
    for body in bodies:
        _complete(components[body.__name__], body)
    components |= {_error_name(shape): _error(shape, fields) for shape, fields in ERRORS.items()}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        described = _described(method, path, operation)
        if needs_key and path in OPEN_PATHS:
            described["security"] = []
        paths.setdefault(path, {})[method.lower()] = described
    secured = {
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{name: []} for name in _KEYS],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxcel", "version": importlib.metadata.version("mlxcel")},
        "paths": paths,
        **(secured if needs_key else {"components": {"schemas": components}}),
    }


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _complete(schema: dict[str, Any], body: type[msgspec.Struct]) -> None:
    """Say of a body's schema what holds of every body."""
    properties: dict[str, Any] = schema["properties"]
    required = schema.get("required", ())
    for name, kind in ITEMS.items():
        if name in properties and body in (ChatBody, TemplateBody):
            properties[name]["items"] = {"$ref": REFERENCE + kind.__name__}
    for name, one in properties.items():
        if name not in required:
            properties[name] = _nullable(one)
    for name, values in neutral_of(body).items():
        properties.setdefault(
            name, {"enum": [*values, None], "description": "does not act; accepted where it asks for nothing"}
        )
    for name in sorted(MEANINGLESS):
        properties.setdefault(name, {"description": "means nothing here"})
    schema["additionalProperties"] = False


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("anyOf") or [{name: value for name, value in schema.items() if name != "default"}]
    null = {"type": "null"}
    default = {"default": schema["default"]} if schema.get("default") is not None else {}
    return {"anyOf": kinds if null in kinds else [*kinds, null], **default}


def _described(method: str, path: str, operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {"application/json": {}}
    if operation.generates:
        answers["text/event-stream"] = {}
    elif operation.endless:
        answers = {"text/event-stream": {}}
    elif path == "/metrics":
        answers = {"text/plain": {}}
    shape = REFERENCE + _error_name(shape_of(path))
    described: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.summary,
        "responses": {
            "200": {"description": "the answer", "content": answers},
            "default": {"description": "an error", "content": {"application/json": {"schema": {"$ref": shape}}}},
        },
    }
    if parameters := _parameters(path, operation):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": {"$ref": REFERENCE + operation.body.__name__}}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": text} for name in operation.query]
    if operation.generates or operation.prioritized:
        parameters.append({"name": "X-Priority", "in": "header", "schema": {"enum": list(PRIORITIES)}})
        parameters.append({"name": "X-Request-Id", "in": "header", "schema": text})
    return parameters


def _error_name(shape: Shape) -> str:
    return f"{shape.capitalize()}Error"


def _error(shape: Shape, fields: Mapping[str, Any]) -> dict[str, Any]:
    inner = _object({name: {"type": kind} for name, kind in fields.items()})
    outer = {"type": {"const": "error"}} if shape == "anthropic" else {}
    return _object({**outer, "error": inner})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}
