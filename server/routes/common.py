"""What every generation route does around the one generation path: body, model, request id, disconnect."""

import contextlib
import functools
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.errors import RequestError
from engine.request import PRIORITIES, Grammar, Priority, TokenLogprob
from engine.served import ServedModel
from server.bodies import GenerationBody
from server.config import ServerConfig
from server.continued import Responses
from server.errors import BodyTooLarge, ModelLoading, json_response, shape_of
from server.generate import Answer, Prompted, Usage, start
from server.logprobs import Logprobs, Spell
from server.models import Models, Served
from server.record import record_of
from server.reply import CallArguments, CallBegun, CallEnded, Choice, Finish, Prefilled, Reasoning, Text
from server.running import Begun, RunningRequests
from server.sse import DONE, ClientGone, Comment, EventStream, unless_gone
from server.validate import MAX_ECHOED, Body, parse

if TYPE_CHECKING:
    from server.exposition import Exposition
    from server.roles.node import Node

MAX_BODY_BYTES = 32 << 20
Said = Text | Reasoning | CallBegun | CallArguments | Finish
_PLAIN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Service:
    """What the routes share for the life of the application."""

    def __init__(self, config: ServerConfig, models: Models, node: "Node | None" = None) -> None:
        self.config = config
        self.models = models
        self.node = node
        self.running = RunningRequests(config.request_timeout)
        self.responses = Responses()
        self.started_s = int(time.time())

    @functools.cached_property
    def exposition(self) -> "Exposition":
        """The metrics of this application; made when first asked for, since a talk never is."""
        from server.exposition import Exposition

        node = self.node
        counts = None if node is None else lambda: node.counts
        return Exposition(self.models.numbers, counts, self.models.places)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def request_id_of(request: Request, prefix: str) -> str:
    """The client's own id for this request, if it is a plain one, else a new one; always the same."""
    record = record_of(request)
    given = request.headers.get("x-request-id", "")
    record.id = record.id or (given if _PLAIN_ID.fullmatch(given) else f"{prefix}-{uuid.uuid4().hex}")
    return record.id


def priority_of(request: Request) -> Priority:
    """What the header X-Priority asks for. Raises RequestError for anything but a priority."""
    given = ", ".join(request.headers.getlist("x-priority")) or "normal"
    for priority in PRIORITIES:
        if given == priority:
            return priority
    raise RequestError(
        f"X-Priority is {given[:MAX_ECHOED]!r}; it must be one of {', '.join(PRIORITIES)}", param="X-Priority"
    )


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """The typed body. Raises RequestError, BodyTooLarge and ClientGone."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as left:
        raise ClientGone from left
    return parse(bytes(data), body_type)


def served_of(request: Request, asked: str = "") -> Served:
    """The model that `asked` names, with its adapter, or the default one where it is empty.

    Raises UnknownModel.
    """
    served = service_of(request).models.find(asked)
    record_of(request).model = served.name
    return served


def looked_at(request: Request) -> Served:
    """The model that the query names, for those who only look at it: they do not wait for it."""
    return served_of(request, request.query_params.get("model", ""))


def loaded(request: Request) -> Served:
    """The same, of several models one that is there. Raises ModelLoading."""
    served = looked_at(request)
    place = service_of(request).models.place(served)
    if place is not None and place.state != "loaded":
        raise ModelLoading(f"the model is {place.state}")
    return served


class Dialect:
    """How one route writes an answer down: the objects of its stream, and the whole answer."""

    object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str) -> None:
        self.request_id = request_id
        self._named = {"id": request_id, "created": int(time.time()), "model": model}

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What the stream says of a choice before its first text, if anything."""
        return None

    def said(self, piece: Said) -> dict[str, Any]:
        """One entry of a chunk's `choices`: more of the answer, or its end."""
        raise NotImplementedError

    def answered(self, number: int, choice: Choice) -> dict[str, Any]:
        """One entry of the whole answer's `choices`."""
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[TokenLogprob], spell: Spell) -> dict[str, Any]:
        """The `logprobs` of an entry, for the tokens of its text."""
        raise NotImplementedError

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**self._named, "object": self.chunk_object, "choices": list(choices), **more}

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        answered = [self.answered(number, choice) for number, choice in enumerate(choices)]
        return {**self._named, "object": self.object, "choices": answered, **_counted(usage)}


class FramedDialect(Dialect):
    """A dialect whose stream has frames of its own, and whose last frame is the end of it."""

    def frames(self, answer: Answer) -> AsyncIterator[Any]:
        """The objects of the stream."""
        raise NotImplementedError

    async def folded(self, answer: Answer) -> Any:
        """The whole answer when it has ended."""
        raise NotImplementedError


def _counted(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "timings": usage.timings_body()}


async def _frames(answer: Answer, dialect: Dialect, include_usage: bool) -> AsyncIterator[Any]:
    for choice in range(answer.num_choices):
        if (opening := dialect.opening(choice)) is not None:
            yield dialect.chunk(opening)
    waiting: dict[int, tuple[TokenLogprob, ...]] = {}  # logprobs, for the next chunk of their choice

    def chunk(entry: dict[str, Any]) -> dict[str, Any]:
        if tokens := waiting.pop(entry["index"], ()):
            entry["logprobs"] = dialect.logprobs(tokens, answer.spell)
        return dialect.chunk(entry)

    async for piece in answer.pieces():
        match piece:
            case Prefilled(done=done, total=total):
                yield Comment(f"prefill {done}/{total}")
            case Logprobs(choice=choice, tokens=tokens):
                waiting[choice] = waiting.get(choice, ()) + tokens
            case CallEnded():
                pass  # the next call or the end of the choice says so
            case _:
                yield chunk(dialect.said(piece))
    if include_usage:
        yield dialect.chunk(**_counted(answer.usage))


async def begun(
    served: Served,
    model: ServedModel,
    dialect: Dialect,
    body: GenerationBody,
    prompted: Prompted,
    priority: Priority,
    grammar: Grammar | None = None,
    **more: Any,
) -> Answer:
    """Enqueue what `body` asks for; `more` is what a dialect alone knows. Raises as `start` does."""
    sampling = body.sampling(model.default_sampling)
    if sampling.is_dry:  # the engine asks for the same and then need not look through the vocabulary
        await served.bridge.text_work(lambda: model.tokens.breakers(sampling.dry_sequence_breakers))
    return await start(
        served.bridge,
        model,
        dialect.request_id,
        prompted,
        sampling,
        max_tokens=body.bound(),
        stop=body.stops(),
        ignore_eos=body.ignore_eos,
        num_choices=body.n,
        priority=priority,
        cache_prompt=body.cache_prompt,
        cache_salt=body.cache_salt,
        prompt_cache_key=body.prompt_cache_key,
        adapter=served.adapter,
        top_logprobs=body.num_logprobs(),
        loops=body.loops(served.engine.loops),
        grammar=grammar or body.constraint(),
        **more,
    )


async def respond(
    request: Request,
    served: Served,
    body: GenerationBody,
    dialect: Dialect,
    begin: Callable[[], Awaitable[Answer]],
) -> Response | ASGIApp:
    """Answer `request` by `served` in `dialect`: begin, then stream or fold."""
    include_usage = bool(body.stream_options and body.stream_options.include_usage)

    async def whole(answer: Answer) -> dict[str, Any]:
        body = dialect.whole(await answer.fold(), answer.usage)
        for entry, tokens in zip(body["choices"], answer.logprobs or (), strict=False):
            entry["logprobs"] = dialect.logprobs(tokens, answer.spell)
        return body

    return await deliver(
        request,
        served,
        dialect.request_id,
        begin,
        frames=(lambda answer: _frames(answer, dialect, include_usage)) if body.stream else None,
        whole=whole,
        user=body.user or "",
    )


async def respond_framed(
    request: Request,
    served: Served,
    dialect: FramedDialect,
    begin: Callable[[], Awaitable[Answer]],
    *,
    stream: bool,
    user: str | None,
) -> Response | ASGIApp:
    """Answer `request` in a dialect that has frames of its own."""
    return await deliver(
        request,
        served,
        dialect.request_id,
        begin,
        frames=dialect.frames if stream else None,
        whole=dialect.folded,
        user=user or "",
        done=b"",
    )


async def deliver(
    request: Request,
    served: Served,
    request_id: str,
    begin: Callable[[], Awaitable[Begun]],
    *,
    frames: Callable[[Begun], AsyncIterator[Any]] | None,
    whole: Callable[[Begun], Awaitable[Any]],
    user: str = "",
    done: bytes = DONE,
) -> Response | ASGIApp:
    """Begin an answer when its model is there, then send it as `frames`, where there are any, or `whole`; `done`
    marks their success.

    A client that leaves ends its rows wherever they are, and so does who cancels the request or the clock.
    """
    service = service_of(request)
    record = record_of(request)
    record.user = user[:MAX_ECHOED]
    headers = {"x-request-id": request_id}
    with contextlib.ExitStack() as under_way:

        async def leased() -> Begun:
            under_way.callback((await service.models.lease(served, priority_of(request))).release)
            return await begin()

        running = under_way.enter_context(service.running.entered(request_id))
        answer = await unless_gone(request.receive, running.begun(leased()))
        under_way.callback(answer.close)
        record.usage = answer.usage
        if frames is not None:
            return EventStream(
                frames(answer),
                close=under_way.pop_all().close,
                keep_alive_s=service.config.keep_alive_s,
                on_error=record.failed,
                headers=headers,
                shape=shape_of(request.url.path),
                done=done,
            )
        body = await unless_gone(request.receive, whole(answer))
    return json_response(body, headers=headers)
