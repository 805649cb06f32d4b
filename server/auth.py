"""Who may ask: API keys, and where a browser's request comes from. Plain ASGI, before any route.

A page in a browser cannot choose the headers `Host` and `Origin`, so a page of another origin is known by them,
and so is one whose host name was pointed at this machine after it was loaded (DNS rebinding). Knows no dialect but
the shape of its errors. docs/security.md says what this defends and what it does not.
"""

import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError, RequestError
from server.address import is_loopback
from server.config import ServerConfig, is_api_key
from server.errors import Foreign, Unauthorized, error_response, shape_of
from server.page import FILES
from server.routes.common import request_id_of

# For whoever watches over the process; and the page, which is the same everywhere and asks for a key itself.
OPEN_PATHS = frozenset({"/health", "/health/ready", *FILES})
ANY_ORIGIN = "*"


def keys_of(config: ServerConfig) -> tuple[str, ...]:
    """The API keys that `config` names and those in its file, one a line. Raises ConfigError."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        try:
            lines = config.api_key_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError("api_key_file", f"{config.api_key_file} cannot be read: {fault}") from fault
        in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not in_file:
            raise ConfigError("api_key_file", f"{config.api_key_file} holds no key", hint="one key a line")
        keys += in_file
    for key in keys:
        if not is_api_key(key):
            raise ConfigError("api_key", "an API key is made of printable ASCII characters without spaces")
    return tuple(keys)


class SameOrigin:
    """ASGI middleware that refuses (403) what a page of a foreign origin has sent.

    An origin is foreign unless it is the host that was asked, or one of `origins`. With `loopback_only`, a host is
    foreign too that is no name of this machine and no host of `origins`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], *, loopback_only: bool) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(urlsplit(origin).hostname for origin in origins)
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else _refused(scope, refusal))(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        host = headers.get("host")
        if self._loopback_only and host is not None and not self._is_known(host):
            return Foreign(
                "the request was made for a host that is not this one",
                hint="ask for localhost, or name the page's origin with --cors-origins",
            )
        origin = headers.get("origin")
        if origin is None or self._origins & {origin, ANY_ORIGIN}:
            return None
        if origin.partition("://")[2].lower() == (host or "").lower() != "":
            return None
        return Foreign(
            "the request comes from a page of another origin", hint="allow its origin with --cors-origins"
        )

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._hosts


class Keys:
    """ASGI middleware that refuses (401) what carries none of `keys`, but for OPEN_PATHS.

    A key comes in a header, `Authorization: Bearer` or `x-api-key`. Every key is compared, in a time that does not
    depend on what was sent.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(_sent(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        missing = Unauthorized(
            "a valid API key is needed", hint="send it as Authorization: Bearer KEY, or as x-api-key"
        )
        await _refused(scope, missing)(scope, receive, send)

    def _knows(self, sent: str) -> bool:
        digest = _digest(sent)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _sent(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(scope: Scope, error: RequestError) -> ASGIApp:
    scope["record"].failed(error)
    named = {"x-request-id": request_id_of(Request(scope), "req")}
    return error_response(error, named, shape=shape_of(scope["path"]))
