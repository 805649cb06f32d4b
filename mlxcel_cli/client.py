"""Typed calls on the HTTP API over any httpx2 transport; what the server refuses comes back as exception types.

It reads the event stream itself and knows nothing of where the server runs or how an answer is shown.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self

import httpx2

from engine.errors import MlxcelError, UserError
from mlxcel_cli import wire
from mlxcel_cli.address import shown, shown_whatever
from mlxcel_cli.errors import NoAnswer, Refused, ServerGone
from mlxcel_cli.pieces import End, Piece
from server.config import is_api_key

JSON = {"content-type": "application/json"}
# A server decides what waits; the default of a hundred connections would wait here, unseen.
UNBOUNDED = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
LISTING_S = 10.0
HIDDEN_KEY = "***"
FORMS = "give http://HOST:PORT or the path of a unix socket that ends in .sock"


class EventStream:
    """Server-sent events out of bytes that are cut anywhere.

    `feed` gives the lines that are whole now, as (kind, value): kind is "data" or "comment"; other fields carry
    nothing here. Lines end in LF, CR LF or CR (WHATWG HTML, section 9.2).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_return = False

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        if not piece:
            return []
        text = piece.removeprefix(b"\n") if self._after_return else piece
        self._after_return = piece.endswith(b"\r")
        lines = (self._rest + text).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, self._rest = lines.split(b"\n")
        events: list[tuple[str, str]] = []
        for line in whole:
            events.extend(self._take(line.decode("utf-8", "replace")))
        return events

    def _take(self, line: str) -> list[tuple[str, str]]:
        if not line:
            data, self._data = self._data, []
            return [("data", "\n".join(data))] if data else []
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        return [("comment", value)] if not name else []


class Client:
    """Calls on one server. `model` is sent with every request where it is given; the server's own else. `key` is
    the API key to show.
    """

    def __init__(
        self,
        transport: httpx2.AsyncBaseTransport,
        base_url: str,
        *,
        address: str = "",
        model: str | None = None,
        key: str = "",
    ) -> None:
        self._address = shown(address or base_url)
        self._key = sent_key(key, self._address)
        self._http = httpx2.AsyncClient(
            transport=transport,
            base_url=base_url,
            timeout=httpx2.Timeout(None, connect=10.0),
            trust_env=False,
            headers={"authorization": f"Bearer {self._key}"} if self._key else None,
        )
        self._model = {"model": model} if model else {}

    @classmethod
    def to(cls, address: str, *, model: str | None = None, key: str = "") -> Self:
        """A client of the server at `address`: http(s)://host:port, with or without /v1, or a socket's path.

        Raises UserError for an address that is neither.
        """
        if address.endswith(".sock"):
            path = address.removeprefix("unix://").removeprefix("unix:")
            transport = httpx2.AsyncHTTPTransport(uds=path, limits=UNBOUNDED)
            return cls(transport, "http://localhost", address=path, model=model, key=key)
        try:
            url = httpx2.URL(address)
        except httpx2.InvalidURL:
            url = httpx2.URL("")
        if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
            raise UserError(f"{shown_whatever(address)} is not the address of a server", hint=FORMS)
        base = address.rstrip("/").removesuffix("/v1")
        return cls(httpx2.AsyncHTTPTransport(limits=UNBOUNDED), base, model=model, key=key)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._http.__aexit__(exc_type, exc_value, traceback)

    def chat(self, messages: Sequence[Mapping[str, str]], asked: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream the answer to `messages`; `asked` are further fields of the request, sent as they are."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **asked})

    def complete(self, prompt: str | Sequence[int], asked: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream the raw completion of `prompt`, a text or the ids of its tokens."""
        return self._stream("/v1/completions", {"prompt": prompt, **asked})

    async def models(self, within_s: float | None = LISTING_S) -> list[str]:
        """The names of the server's models."""
        return [entry["id"] for entry in await self.described_models(within_s)]

    async def described_models(self, within_s: float | None = LISTING_S) -> list[dict[str, Any]]:
        """The server's models, each with what it says of it. Raises ServerGone where that takes longer than
        `within_s` (None: any time).
        """
        try:
            async with asyncio.timeout(within_s):
                entries = (await self._get("/v1/models")).get("data")
        except TimeoutError:
            raise ServerGone(f"{self._address} did not list its models within {within_s:g} s") from None
        if not isinstance(entries, list):
            return []
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def health(self) -> str:
        """What the server says of itself, such as "ok". Raises ServerBusy while its model loads."""
        return str((await self._get("/health")).get("status", ""))

    async def props(self) -> dict[str, Any]:
        """What the server says of its model and of how it runs it."""
        return await self._get("/props")

    async def context_length(self) -> int | None:
        """The most tokens that prompt and answer may have together; None where the server does not say."""
        try:
            async with asyncio.timeout(LISTING_S):
                settings = (await self.props()).get("default_generation_settings")
        except (MlxcelError, TimeoutError):
            return None
        return wire.count_of(settings.get("n_ctx") if isinstance(settings, dict) else None) or None

    async def num_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """How many tokens the prompt of `messages` has. Raises UserError where the server does not count them."""
        body: dict[str, Any] = {"model": self._model.get("model") or next(iter(await self.models()), "")}
        body["messages"] = [message for message in messages if message["role"] != "system"]
        if system := [message["content"] for message in messages if message["role"] == "system"]:
            body["system"] = system[0]
        try:
            counted = (await self._get("/v1/messages/count_tokens", method="POST", body=body)).get("input_tokens")
        except Refused as refusal:
            if refusal.status not in (404, 405, 501):
                raise
            counted = None
        if (number := wire.count_of(counted)) is None:
            raise UserError(f"the server at {self._address} does not count tokens")
        return number

    async def tokens(self, text: str) -> list[int]:
        """The ids of `text`'s tokens, as llama-server gives them too."""
        tokens = (await self._get("/tokenize", method="POST", body={"content": text})).get("tokens")
        if not isinstance(tokens, list):
            raise NoAnswer("a text without its tokens")
        return tokens

    async def router_stats(self) -> dict[str, Any]:
        """A router's nodes, and what it has them do. Raises NoAnswer where it lists none."""
        stats = await self._get("/router/stats")
        nodes = stats.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
            raise NoAnswer("figures of a router without its nodes")
        return stats

    async def drain(self, node: str, *, drains: bool) -> None:
        """Have a router give `node` nothing new, or let it take part again."""
        await self._get(f"/router/nodes/{node}/drain", method="POST" if drains else "DELETE")

    async def _get(
        self, path: str, *, method: str = "GET", body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        with self._judged():
            response = await self._http.request(method, path, json=body)
            if not response.is_success:
                raise _refusal(response, response.content)
            return wire.object_of(response.content)

    async def _stream(self, path: str, fields: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        body = {**self._model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        try:
            content = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError("what is to be sent is not UTF-8 text") from None
        with self._judged():
            async with self._http.stream("POST", path, content=content, headers=JSON) as response:
                if not response.is_success:
                    raise _refusal(response, await response.aread())
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if response.status_code == 204 or kind in wire.NO_STREAMS:
                    raise wire.no_stream(await response.aread())
                async with aclosing(_pieces(response.aiter_bytes())) as pieces:
                    async for piece in pieces:
                        yield piece

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """What goes wrong in one exchange, as this project's exceptions; none of them shows the key."""
        try:
            yield
        except httpx2.TransportError as error:
            raise self._gone(error) from error
        except httpx2.DecodingError as error:
            raise NoAnswer("a body that is not in the content-encoding it names") from error
        except MlxcelError as problem:
            if self._key:
                problem.args = tuple(str(said).replace(self._key, HIDDEN_KEY) for said in problem.args)
            raise

    def _gone(self, error: httpx2.TransportError) -> ServerGone:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return ServerGone(f"no server answers at {self._address}", hint="is `mlxcel serve` running there?")
        return ServerGone(f"the server broke off: {error or type(error).__name__}")


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Piece, None]:
    """The pieces of one event stream; the End, with what came after the finish chunk, is always the last.

    Raises ServerFault for an error frame and ServerGone for a stream that ends without the mark of its end.
    """
    events, reason = EventStream(), ""
    numbers: dict[str, Mapping[str, Any]] = {}
    async for chunk in chunks:
        for kind, value in events.feed(chunk):
            if kind == "comment":
                if (progress := wire.progress_of(value)) is not None:
                    yield progress
                continue
            if value == "[DONE]":
                yield End(reason, **numbers)
                return
            frame = wire.frame_of(value)
            numbers |= wire.numbers_of(frame)
            for brought, ended in wire.choices_of(frame):
                reason = ended or reason
                for piece in brought:
                    yield piece
    raise ServerGone("the server broke off in mid-answer")


def sent_key(key: str, address: str) -> str:
    """`key` as it is sent: without the white space around it. Raises UserError for what cannot be a key."""
    stripped = key.strip()
    if key and not is_api_key(stripped):
        raise UserError(
            f"the API key for {address} cannot be one", hint="it is printable ASCII characters without spaces"
        )
    return stripped


def _refusal(response: httpx2.Response, content: bytes) -> MlxcelError:
    location = response.headers.get("location", "") if response.is_redirect else ""
    return wire.refusal(response.status_code, content, shown(location))
