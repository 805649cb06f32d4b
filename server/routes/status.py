"""How the server is: `GET /health` and `/metrics`."""

from starlette.requests import Request
from starlette.responses import Response

from server.errors import error_response, json_response
from server.routes.common import service_of


async def health(request: Request) -> Response:
    """200 when the model is there, 503 while it loads and when the engine is gone."""
    bridge = service_of(request).bridge
    if bridge.fault is not None:
        return error_response(bridge.fault)
    if bridge.model_now is None:
        return json_response({"status": "loading model"}, 503, {"retry-after": "1"})
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """The engine's numbers, as Prometheus reads them."""
    exposition = service_of(request).exposition
    return Response(exposition.write(), headers={"content-type": exposition.content_type})
