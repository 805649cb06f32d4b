"""How the server is: `GET /health`, `/health/ready`, `/metrics`, `/events` and `/openapi.json`."""

import functools

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import NO_NODE, EngineStalled, NoNode, error_response, json_response
from server.openapi import document
from server.routes.common import looked_at, service_of
from server.sse import EventStream


async def health(request: Request) -> Response:
    """200 when what is to be there from the start is, 503 while it loads and when the engine is gone."""
    models = service_of(request).models
    if models.fault is not None:
        return error_response(models.fault)
    if models.is_loading:
        is_router = service_of(request).config.node_role == "router"
        status = "waiting for nodes" if is_router else "loading model"
        return json_response({"status": status}, 503, {"retry-after": "1"})
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """As `/health`, and 503 also when work is in flight and nothing has come of it for too long, and at a router
    none of whose nodes takes any.
    """
    service = service_of(request)
    silent_s, bound_s = service.models.silent_s(), service.config.stall_timeout
    if bound_s and silent_s > bound_s and service.models.fault is None:
        stalled = EngineStalled(f"requests run, and for {silent_s:.0f} s nothing has come of them")
        return error_response(stalled)
    router = None if service.node is None else service.node.router
    if router is not None and router.model is not None and not router.takes:
        return error_response(NoNode(NO_NODE))
    return await health(request)


async def openapi(request: Request) -> Response:
    """What this server understands, as OpenAPI 3.1."""
    config = service_of(request).config
    return json_response(document(needs_key=config.needs_key, is_router=config.node_role == "router"))


async def metrics(request: Request) -> Response:
    """The engine's numbers, as Prometheus reads them."""
    exposition = service_of(request).exposition
    return Response(exposition.write(), headers={"content-type": exposition.content_type})


async def events(request: Request) -> ASGIApp:
    """What the engine does, for as long as the client listens and the server runs."""
    service = service_of(request)
    feed = looked_at(request).feed
    watcher = feed.watch()
    return EventStream(
        aiter(watcher),
        close=functools.partial(feed.leave, watcher),
        keep_alive_s=service.config.keep_alive_s,
        done=b"",
    )
