"""Typed calls on the HTTP API over any httpx2 transport; what the server refuses comes back as exception types.

It reads the event stream itself and knows nothing of where the server runs or how an answer is shown.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import httpx2

from engine.errors import MlxcelError, UserError
from mlxcel_cli.errors import EngineGone, NoTemplate, Refused, ServerBusy, ServerFault, ServerGone
from mlxcel_cli.pieces import End, Piece, Prefill, Reasoning, Text

ENGINE_GONE = ("model_not_loaded", "engine_stopped")
JSON = {"content-type": "application/json"}
# A server decides what waits; the default of a hundred connections would wait here, unseen.
UNBOUNDED = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
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
        self._http = httpx2.AsyncClient(
            transport=transport,
            base_url=base_url,
            timeout=httpx2.Timeout(None, connect=10.0),
            trust_env=False,
            headers={"authorization": f"Bearer {key}".encode()} if key else None,
        )
        self._address = address or base_url
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
            raise UserError(f"{address} is not the address of a server", hint=FORMS)
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

    async def models(self) -> list[str]:
        """The names of the server's models."""
        return [entry["id"] for entry in await self.described_models()]

    async def described_models(self) -> list[dict[str, Any]]:
        """The server's models, each with what it says of it."""
        listing = await self._get("/v1/models")
        entries = listing.get("data")
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
            settings = (await self.props()).get("default_generation_settings")
        except MlxcelError:
            return None
        length = settings.get("n_ctx") if isinstance(settings, dict) else None
        return length if isinstance(length, int) and length > 0 else None

    async def num_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """How many tokens the prompt of `messages` has. Raises UserError where the server does not count them."""
        body = {"model": self._model.get("model") or (await self.models())[0]}
        body["messages"] = [message for message in messages if message["role"] != "system"]
        if system := [message["content"] for message in messages if message["role"] == "system"]:
            body["system"] = system[0]
        try:
            counted = (await self._get("/v1/messages/count_tokens", method="POST", body=body)).get("input_tokens")
        except Refused as refusal:
            if refusal.status not in (404, 405, 501):
                raise
            counted = None
        if not isinstance(counted, int):
            raise UserError(f"the server at {self._address} does not count tokens")
        return counted

    async def tokens(self, text: str) -> list[int]:
        """The ids of `text`'s tokens, as llama-server gives them too."""
        return list((await self._get("/tokenize", method="POST", body={"content": text}))["tokens"])

    async def router_stats(self) -> dict[str, Any]:
        """A router's nodes, and what it has them do."""
        return await self._get("/router/stats")

    async def drain(self, node: str, *, drains: bool) -> None:
        """Have a router give `node` nothing new, or let it take part again."""
        await self._get(f"/router/nodes/{node}/drain", method="POST" if drains else "DELETE")

    async def _get(
        self, path: str, *, method: str = "GET", body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx2.TransportError as error:
            raise self._gone(error) from error
        if response.is_error:
            raise _refusal(response.status_code, response.content)
        return _object(response.content)

    async def _stream(self, path: str, fields: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        body = {**self._model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        try:
            content = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError("what is to be sent is not UTF-8 text") from None
        try:
            async with self._http.stream("POST", path, content=content, headers=JSON) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread())
                async with aclosing(_pieces(response.aiter_bytes())) as pieces:
                    async for piece in pieces:
                        yield piece
        except httpx2.TransportError as error:
            raise self._gone(error) from error

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
                if (progress := _progress(value)) is not None:
                    yield progress
                continue
            if value == "[DONE]":
                yield End(reason, **numbers)
                return
            frame = _object(value.encode())
            if frame.get("error"):
                raise ServerFault(_message_of(frame) or "the server failed in mid-answer")
            numbers |= {name: frame[name] for name in ("usage", "timings") if isinstance(frame.get(name), dict)}
            for choice in frame.get("choices") or ():
                reason = choice.get("finish_reason") or reason
                delta = choice.get("delta") or {}
                if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield Reasoning(thought)
                if text := delta.get("content") or choice.get("text"):
                    yield Text(text)
    raise ServerGone("the server broke off in mid-answer")


def _progress(comment: str) -> Prefill | None:
    words = comment.split()
    if len(words) == 2 and words[0] == "prefill":
        done, _, total = words[1].partition("/")
        if done.isdecimal() and total.isdecimal():
            return Prefill(int(done), int(total))
    return None


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerFault("the server's answer is not what was expected: is it an OpenAI-compatible server?")
    return value


def _message_of(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _refusal(status: int, content: bytes) -> MlxcelError:
    try:
        answer = _object(content)
    except ServerFault:
        answer = {}
    error = answer.get("error")
    code = str(error.get("code") or "") if isinstance(error, dict) else ""
    message = _message_of(answer) or f"the server answered with status {status}"
    if code == "no_chat_template":
        return NoTemplate(message, status=status, code=code)
    if code in ENGINE_GONE:
        return EngineGone(message)
    if status == 503:
        return ServerBusy(message, hint="ask again in a moment")
    if status < 500 or status == 501:
        return Refused(message, status=status, code=code)
    return ServerFault(message)
