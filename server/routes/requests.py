"""`POST /v1/requests/{id}/cancel`: end a request that runs or waits."""

from starlette.requests import Request
from starlette.responses import Response

from server.errors import UnknownRequest, json_response
from server.routes.common import service_of
from server.validate import MAX_ECHOED


async def cancel(request: Request) -> Response:
    """The id is the `X-Request-Id` that was sent or given back, which is the answer's id too."""
    request_id = request.path_params["id"]
    num_cancelled = service_of(request).running.cancel(request_id)
    if not num_cancelled:
        raise UnknownRequest(f"no request {request_id[:MAX_ECHOED]!r} runs or waits here", param="id")
    return json_response({"id": request_id, "object": "request.cancelled", "cancelled": num_cancelled})
