"""The ASGI application: routes as a list, the error table, and a lifespan that owns the engine's loop."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import MlxcelError
from server.adapters import check_folders
from server.auth import Keys, SameOrigin, keys_of
from server.config import ServerConfig
from server.errors import NoRoute, error_response, shape_of
from server.models import Models, residency_of
from server.page import FILES
from server.record import Recorded, record_of
from server.routes.adapters import list_adapters, mount_adapter, unmount_adapter
from server.routes.cache import cache_stats, reset_cache
from server.routes.chat import chat_completions
from server.routes.common import Service, request_id_of
from server.routes.completion import completion
from server.routes.completions import completions
from server.routes.drafts import draft_policy
from server.routes.embeddings import embeddings
from server.routes.messages import count_tokens, messages
from server.routes.models import list_models, one_model
from server.routes.native import props, slots
from server.routes.page import page
from server.routes.requests import cancel
from server.routes.responses import kept_response, responses
from server.routes.status import events, health, metrics, openapi, ready
from server.routes.tokens import apply_template, detokenize, tokenize
from server.sse import ClientGone

if TYPE_CHECKING:
    from server.roles.node import Node

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{id}", kept_response, methods=["GET", "DELETE"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", one_model, methods=["GET"]),
    Route("/v1/adapters", list_adapters, methods=["GET"]),
    Route("/v1/adapters", mount_adapter, methods=["POST"]),
    Route("/v1/adapters/{name:path}", unmount_adapter, methods=["DELETE"]),
    Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
    Route("/v1/cache/stats", cache_stats, methods=["GET"]),
    Route("/v1/internal/draft-policy", draft_policy, methods=["GET"]),
    Route("/v1/cache/reset", reset_cache, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/health/ready", ready, methods=["GET"]),
    Route("/completion", completion, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/props", props, methods=["GET"]),
    Route("/slots", slots, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/events", events, methods=["GET"]),
]
PAGE_ROUTES = [Route(path, page, methods=["GET"]) for path in FILES]


def make_app(
    config: ServerConfig,
    *,
    on_fault: Callable[[MlxcelError], None] = lambda fault: None,
    **loop_options: Any,
) -> Starlette:
    """The application for `config`. Its lifespan starts loading the model and returns at once.

    `on_fault` is called when the engine is gone for good; `loop_options` reach the `EngineLoop`. Raises
    ConfigError for keys that are none, and for folders that are not there.
    """
    check_folders(config)
    node = None if config.node_role == "none" else _node(config)
    if config.others:
        residency_of(config)  # for what it raises

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if config.node_role == "router":
            assert node is not None, "a router is a node"
            loop_options.update(loop=node.loop, wait=node.waited)
        models = Models(config, on_fault=on_fault, **loop_options)
        app.state.service = Service(config, models, node)
        models.start()
        if node is not None:
            node.start(models.default.bridge, on_fault)
        try:
            yield
        finally:
            models.end_watching()
            if node is not None:
                await node.close()
            await models.stop()

    handlers: dict[Any, Any] = {
        MlxcelError: _refused,
        ClientGone: _gone,
        HTTPException: _no_such_route,
        Exception: _failed,
    }
    routes = [*ROUTES, *([] if config.no_web else PAGE_ROUTES)]
    routes += _router_routes() if config.node_role == "router" else []
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=_middleware(config))


def _node(config: ServerConfig) -> "Node":
    """Loaded where there are several processes alone."""
    from server.roles.node import Node

    return Node(config)


def _router_routes() -> list[Route]:
    from server.routes.router import drain, router_stats

    return [
        Route("/router/stats", router_stats, methods=["GET"]),
        Route("/router/nodes/{id}/drain", drain, methods=["POST", "DELETE"]),
    ]


def _middleware(config: ServerConfig) -> list[Middleware]:
    """What stands before the routes, the first outermost. Raises ConfigError for keys that are none."""
    before = [
        Middleware(Recorded, model=config.served_name),
        Middleware(SameOrigin, origins=config.cors_origins, loopback_only=config.is_on_loopback),
    ]
    if config.cors_origins:
        before.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if keys := keys_of(config):
        before.append(Middleware(Keys, keys=keys))
    return before


async def _refused(request: Request, error: Exception) -> Response:
    record_of(request).failed(error)
    return _answered(request, error)


async def _failed(request: Request, error: Exception) -> Response:
    # Raised again behind this, and so logged, by whoever runs the application.
    return _answered(request, error)


async def _gone(request: Request, error: Exception) -> Response:
    record_of(request).failed(error)
    return Response(status_code=499)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing = NoRoute(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    record_of(request).failed(missing)
    return _answered(request, missing, error.headers)


def _answered(request: Request, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    named = {**(headers or {}), "x-request-id": request_id_of(request, "req")}
    return error_response(error, named, shape=shape_of(request.url.path))
