"""What a router tells of its nodes, `GET /router/stats`, and keeping one from new requests."""

from starlette.requests import Request
from starlette.responses import Response

from server.address import is_loopback
from server.errors import NoRoute, json_response
from server.roles.router import Router
from server.routes.common import service_of


async def router_stats(request: Request) -> Response:
    """Addresses of nodes are told to whoever asks from this machine."""
    here = request.client is None or is_loopback(request.client.host)
    return json_response(_router(request).stats(addresses=here))


async def drain(request: Request) -> Response:
    """POST: the node gets nothing new, and what it has runs on; DELETE: it takes part again."""
    name, drains = request.path_params["id"], request.method == "POST"
    if not _router(request).drain(name, drains=drains):
        raise NoRoute(f"there is no node {name}", 404)
    return json_response({"id": name, "draining": drains})


def _router(request: Request) -> Router:
    node = service_of(request).node
    if node is None or node.router is None:
        raise NoRoute("this server is no router", 404)
    return node.router
