"""`GET /v1/models` and `/v1/models/{id}`: what is served, with the context length that is enforced."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.models import Served
from server.routes.common import Service, service_of


def _described(service: Service, served: Served) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "mlxcel",
    }
    if served.adapter:
        described["parent"] = served.base.name
    if (place := service.models.place(served)) is not None:
        described["status"] = {
            "value": place.state,
            "pinned": place.is_pinned,
            "requests": place.num_leases,
            "bytes": place.claim_bytes,
            "error": place.fault or None,
        }
    if model := served.bridge.model_now:
        described["max_model_len"] = model.context_length
        described["meta"] = {"n_ctx": model.context_length, "n_vocab": model.tokens.vocab_size}
    return described


async def list_models(request: Request) -> Response:
    service = service_of(request)
    described = [_described(service, served) for served in service.models.each]
    return json_response({"object": "list", "data": described})


async def one_model(request: Request) -> Response:
    service = service_of(request)
    return json_response(_described(service, service.models.find(request.path_params["id"])))
