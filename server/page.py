"""The built-in page: which files it is made of, and what a browser is told to hold it to.

The files are in `server/web`, written by hand and served as they are. The policy lets the page load its own files
and ask its own server, and nothing else: no script or style in the text, no other host, no frame around it.
"""

import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files

FILES = {
    "/": "index.html",
    **{
        f"/web/{name}": name
        for name in (
            "app.css", "app.js", "api.js", "chart.js", "chat.js", "dom.js", "engine.js", "icon.svg",
            "markdown.js", "models.js", "settings.js", "sidebar.js", "store.js", "timeline.js", "turn.js",
        )
    },
}  # fmt: skip
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is served; `etag` changes with its bytes."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def file_at(path: str) -> File:
    """What is served at a path of FILES; read when first asked for."""
    name = FILES[path]
    content = files("server").joinpath("web", name).read_bytes()
    media_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
    return File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
