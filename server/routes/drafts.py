"""`GET /v1/internal/draft-policy`: who drafts, how much of it is accepted, and which widths pay."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from server.errors import json_response
from server.routes.common import loaded


async def draft_policy(request: Request) -> Response:
    """The verdicts as they stand; `kind` is `none` where every step gives one token."""
    policy = await loaded(request).bridge.draft_policy()
    if policy is None:
        return json_response({"kind": "none"})
    stats = asdict(policy.stats) | {"mean_accepted": round(policy.stats.mean_accepted, 3)}
    return json_response(asdict(policy) | {"stats": stats})
