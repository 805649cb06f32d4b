"""`GET /v1/models` and `/v1/models/{id}`: what is served, with the context length that is enforced."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.routes.common import Service, check_model, service_of


def _described(service: Service) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": service.config.served_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "mlxcel",
    }
    if model := service.bridge.model_now:
        described["max_model_len"] = model.context_length
        described["meta"] = {"n_ctx": model.context_length, "n_vocab": model.tokens.vocab_size}
    return described


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_described(service_of(request))]})


async def one_model(request: Request) -> Response:
    service = service_of(request)
    check_model(service, request.path_params["id"])
    return json_response(_described(service))
