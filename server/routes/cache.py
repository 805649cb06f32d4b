"""`GET /v1/cache/stats` and `POST /v1/cache/reset`: what the prompt cache holds, and dropping it."""

from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.routes.common import loaded


async def cache_stats(request: Request) -> Response:
    return json_response(await loaded(request).bridge.cache_stats())


async def reset_cache(request: Request) -> Response:
    return json_response({"freed_bytes": await loaded(request).bridge.reset_cache()})
