"""The built-in page at `GET /`, and its files; a browser that has one already is told so."""

from starlette.requests import Request
from starlette.responses import Response

from server.page import HEADERS, file_at


async def page(request: Request) -> Response:
    file = file_at(request.url.path)
    headers = {**HEADERS, "etag": file.etag}
    held = request.headers.get("if-none-match", "")
    if held.strip() == "*" or file.etag in (tag.strip().removeprefix("W/") for tag in held.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "content-type": file.media_type})
