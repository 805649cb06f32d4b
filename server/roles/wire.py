"""What nodes say to each other: messages of msgpack, each behind a byte that is the version, and bytes of rows.

Every frame's size is bounded before it is allocated (`sockets.py`), and what a message says is checked here before
anything is done with it: who sends it holds a key or is on this machine, and may still be of another version, or
broken. Knows no sockets.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.errors import (
    ContextLengthExceeded,
    EngineStopped,
    MlxcelError,
    NeverFits,
    QueueFull,
    RequestError,
    StepFailed,
)
from engine.handover import Identity, RowState
from engine.request import FinishReason, Loops, Output, Request, Row, Storable, Timings, TokenLogprob
from engine.text.continued import Continued
from engine.text.parts import Part

VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20  # of one frame, both ways
PART_BYTES = 2 << 20  # of a row's state in one message
MAX_TOP_LOGPROBS, MAX_TEXTS, MAX_TAG = 20, 64, 4096
MAX_VOCABULARY, MAX_SLOTS, MAX_TOKENS = 1 << 21, 1 << 12, 1 << 28  # that a node may say it has
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 2  # the rest is for what has come of it, when it goes on elsewhere
MAX_INT = (1 << 63) - 1


class Refused(Exception):
    """A frame that nothing is done with; the text says why, in words for a log and a count."""


class Message(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, frozen=True):
    """Any message."""


class Hello(Message, tag="hello", frozen=True):
    """What are you? The first word of a router, and its first after a silence."""


class Welcome(Message, tag="welcome", frozen=True):
    """What a node is. `boot` names this run of its process; `capacity` requests may run and wait at once.

    A prompt of more than `most_prompt_tokens` could never be stored. `vocabulary` is a digest of all tokens.
    """

    boot: str
    role: str
    identity: Identity
    vocabulary: str
    vocab_size: int
    context_length: int
    num_slots: int
    capacity: int
    most_prompt_tokens: int
    storable: Storable
    cuts_at_turns: bool
    storage_backend: str


class Ping(Message, tag="ping", frozen=True):
    """Are you there?"""


class Pong(Message, tag="pong", frozen=True):
    """A node is there: how many requests run and wait, and for how long nothing has come of them.

    One that `drains` ends what it has and takes nothing new.
    """

    boot: str
    active: int
    waiting: int
    silent_s: float
    drains: bool = False


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a row's state is: `handle` at the node that listens at `address`."""

    address: str
    handle: str
    state: RowState


class Start(Message, tag="start", frozen=True):
    """Run `request`, as number `number` of the router's. `begun` is the answer's beginning that its markup is
    behind; `fetch` says where what it has stored is.
    """

    number: int
    request: Request
    begun: str = ""
    fetch: Fetch | None = None


class Expect(Message, tag="expect", frozen=True):
    """A prompt that is going to come: have its beginning stored when nothing else runs."""

    request: Request


class Cancel(Message, tag="cancel", frozen=True):
    """End a request, or give up what it has left to be fetched."""

    number: int


class Stored(Message, tag="stored", frozen=True):
    """So many tokens of a request's prompt are stored."""

    number: int
    done: int
    total: int


class Said(Message, tag="said", frozen=True):
    """A new token and what it released: an `Output` without its row."""

    number: int
    token: int
    text: str
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    parts: tuple[Part, ...] = ()
    drawn: TokenLogprob | None = None
    mu: float | None = None
    stop_string: str = ""

    @classmethod
    def of(cls, number: int, output: Output) -> "Said":
        said = {name: getattr(output, name) for name in _OUTPUT}
        return cls(number=number, stop_string=output.row.stop_string, **said)

    def output(self, row: Row) -> Output:
        """The event, for the `row` that stands for the request here."""
        row.stop_string = self.stop_string
        return Output(row, **{name: getattr(self, name) for name in _OUTPUT})


_OUTPUT = tuple(field.name for field in dataclasses.fields(Output) if field.name != "row")


class HandedOver(Message, tag="handed_over", frozen=True):
    """The request's state waits to be fetched, by this handle. `num_cached` prompt tokens were not computed."""

    number: int
    handle: str
    state: RowState
    num_cached: int
    cache_miss: int | None
    prompt_ms: float


class Ended(Message, tag="ended", frozen=True):
    """The request has ended by an error of the type `kind`; `numbers` are what the error has beside its text."""

    number: int
    kind: str
    message: str
    param: str = ""
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, number: int, error: MlxcelError) -> "Ended":
        kind = next((kind for kind in _ERRORS if isinstance(error, _ERRORS[kind])), "StepFailed")
        numbers: tuple[int, ...] = ()
        if isinstance(error, ContextLengthExceeded):
            numbers = error.prompt_tokens, error.context_tokens
        return cls(number, kind, str(error), getattr(error, "param", ""), numbers)

    @property
    def error(self) -> MlxcelError:
        kind = _ERRORS.get(self.kind, StepFailed)
        if issubclass(kind, ContextLengthExceeded):
            if len(self.numbers) != 2:
                return RequestError(self.message, param=self.param)
            return ContextLengthExceeded(*self.numbers, param=self.param)
        error = kind(self.message, param=self.param) if issubclass(kind, RequestError) else kind(self.message)
        assert isinstance(error, MlxcelError), "the table has our own errors"
        return error


# The first that an error is an instance of names it.
_ERRORS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (ContextLengthExceeded, NeverFits, RequestError, QueueFull, EngineStopped, StepFailed)
}


class Pull(Message, tag="pull", frozen=True):
    """Send the bytes of a state from `start` to `stop`."""

    handle: str
    start: int
    stop: int


class Piece(Message, tag="part", frozen=True):
    """Those bytes: they are the frames behind this one."""

    handle: str
    start: int


class Gone(Message, tag="gone", frozen=True):
    """There is no such state, or no longer."""

    handle: str


class Fetched(Message, tag="fetched", frozen=True):
    """All of a state was fetched, or it is not wanted: nobody needs it any more."""

    handle: str


ToNode = Hello | Ping | Start | Expect | Cancel | Pull | Fetched
ToRouter = Welcome | Pong | Stored | Said | HandedOver | Ended
ToFetcher = Piece | Gone

_encode = msgspec.msgpack.Encoder().encode
_TO_NODE = msgspec.msgpack.Decoder(ToNode)
_TO_ROUTER = msgspec.msgpack.Decoder(ToRouter)
_TO_FETCHER = msgspec.msgpack.Decoder(ToFetcher)


def encoded(message: Message) -> bytes:
    """The frame of `message`."""
    return bytes((VERSION,)) + _encode(message)


def for_node(frame: Any) -> ToNode:
    """What a node was told. Raises Refused."""
    message: ToNode = _decoded(_TO_NODE, frame)
    return message


def for_router(frame: Any) -> ToRouter:
    """What a node has told a router. Raises Refused."""
    message: ToRouter = _decoded(_TO_ROUTER, frame)
    return message


def for_fetcher(frame: Any) -> ToFetcher:
    """What one who fetches a state was told. Raises Refused."""
    message: ToFetcher = _decoded(_TO_FETCHER, frame)
    return message


def _decoded(decoder: Any, frame: Any) -> Any:
    view = memoryview(frame)
    if not view.nbytes:
        raise Refused("an empty frame")
    if view[0] != VERSION:
        raise Refused(f"version {view[0]} of the protocol, and here it is {VERSION}")
    try:
        return decoder.decode(view[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise Refused(f"no message: {fault}") from fault


def check_welcome(welcome: Welcome) -> None:
    """Raises Refused for numbers that no node has."""
    bounds = (
        (welcome.vocab_size, MAX_VOCABULARY),
        (welcome.context_length, MAX_TOKENS),
        (welcome.num_slots, MAX_SLOTS),
        (welcome.capacity, MAX_TOKENS),
    )
    if not all(0 < number <= most for number, most in bounds):
        raise Refused("a welcome with numbers that no node has")


def check_said(said: Said, vocab_size: int) -> None:
    """Raises Refused for tokens that are none of the model's."""
    told = [*said.logprobs, *([said.drawn] if said.drawn else [])]
    ids = [said.token, *(one.token for one in told), *(token for one in told for token, _ in one.top)]
    if not all(0 <= token < vocab_size for token in ids):
        raise Refused("tokens that are none of the model's")


def within_bounds(request: Request) -> Request:
    """The request with numbers that fit into a message and mean the same.

    Raises RequestError for one that is too long to be passed on.
    """
    sampling = request.sampling
    large: dict[str, Any] = {
        field.name: min(value, MAX_INT)
        for field in dataclasses.fields(sampling)
        if isinstance(value := getattr(sampling, field.name), int) and field.name != "seed" and value > MAX_INT
    }
    most = None if request.max_tokens is None else min(request.max_tokens, MAX_INT)
    request = dataclasses.replace(request, sampling=dataclasses.replace(sampling, **large), max_tokens=most)
    num_bytes = len(encoded(Start(0, request, begun_of(request))))
    if num_bytes > MAX_REQUEST_BYTES:
        raise RequestError(
            f"the request takes {num_bytes} bytes, and a router passes on {MAX_REQUEST_BYTES} at most"
        )
    return request


def begun_of(request: Request) -> str:
    """What the answer's markup is behind, which `Start` carries beside the request."""
    return request.markup.begun if isinstance(request.markup, Continued) else ""


def request_of(request: Request, begun: str, *, vocab_size: int) -> Request:
    """The request as the engine may have it. Raises Refused for what no router of this version sends."""
    resumed = request.resumed
    ids = [request.prompt, resumed.output if resumed else (), request.thinking.end if request.thinking else ()]
    ids.append(tuple(token for token, _ in request.sampling.logit_bias))
    if not request.prompt or not all(0 <= token < vocab_size for tokens in ids for token in tokens):
        raise Refused("token ids that are none of the model's")
    if not _is_sound(request):
        raise Refused("numbers that no request has")
    markup = request.markup
    if markup is None:
        return request
    texts = [*(markup.think or ()), *(start for start, _ in markup.calls), *markup.dropped]
    if len(texts) > MAX_TEXTS or not all(0 < len(text) <= MAX_TAG for text in texts):
        raise Refused("tags that no markup has")
    return dataclasses.replace(request, markup=Continued.of(markup, begun)) if begun else request


def _is_sound(request: Request) -> bool:
    sampling, loops = request.sampling, request.loops
    floats = [value for value in dataclasses.astuple(sampling) if isinstance(value, float)]
    floats += [bias for _, bias in sampling.logit_bias]
    return (
        all(map(math.isfinite, floats))
        and sampling.repetition_penalty > 0
        and min(sampling.temperature, sampling.top_k, sampling.min_keep, request.choice) >= 0
        and sampling.repeat_last_n >= -1
        and sampling.dry_penalty_last_n >= -1
        and sampling.mirostat in (0, 1, 2)
        and (request.max_tokens is None or request.max_tokens >= 1)
        and (request.top_logprobs is None or 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS)
        and (loops is None or _are_sound(loops))
        and list(request.boundaries) == sorted(set(request.boundaries))
        and all(0 < cut <= len(request.prompt) for cut in request.boundaries)
    )


def _are_sound(loops: Loops) -> bool:
    return 1 <= loops.min_tokens <= loops.max_tokens <= 512 and 2 <= loops.count <= 1000


def cut(buffers: Iterable[memoryview], start: int, stop: int) -> list[memoryview]:
    """The bytes `start` to `stop` of what `buffers` hold one behind the other, where they lie."""
    parts, at = [], 0
    for buffer in buffers:
        first, last = max(start - at, 0), min(stop - at, buffer.nbytes)
        if first < last:
            parts.append(buffer[first:last])
        at += buffer.nbytes
        if at >= stop:
            break
    return parts
