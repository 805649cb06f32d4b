"""`GET` and `POST /v1/adapters`, `DELETE /v1/adapters/{name}`: what is mounted, mounting, taking away."""

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import AdapterNotFound
from server import adapters
from server.adapters import AdapterBody
from server.errors import UnknownModel, json_response
from server.routes.common import read_body, served_of, service_of


async def list_adapters(request: Request) -> Response:
    models = service_of(request).models
    listed = [entry for served in models.served for entry in await adapters.described(served)]
    return json_response({"object": "list", "data": listed})


async def mount_adapter(request: Request) -> Response:
    body = await read_body(request, AdapterBody)
    service = service_of(request)
    base = served_of(request, body.model)
    root = service.config.adapter_dir
    one = await adapters.mount(service.models, base, body, root, request.receive)
    [entry] = [entry for entry in await adapters.described(one.base) if entry["name"] == one.adapter]
    return json_response(entry)


async def unmount_adapter(request: Request) -> Response:
    service, name = service_of(request), request.path_params["name"]
    try:
        served = served_of(request, name)
    except UnknownModel as error:
        raise AdapterNotFound(str(error)) from error
    await adapters.unmount(service.models, served)
    return json_response({"id": served.name, "object": "adapter", "deleted": True})
