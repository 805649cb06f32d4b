"""Bodies to typed requests. Every field acts or is refused by name; null means "not given".

The types say what acts. A field of the dialect that does not act yet may be sent with the value that asks for
nothing; any other value of it is refused, and so is a field that nobody knows. A type with a NEUTRAL of its own is
another dialect's.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from engine.request import Sampling
from server.errors import NotSupported
from server.limits import check_limits

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_NAME = 1024
MAX_ECHOED = 100  # characters of a body's names that errors repeat

# Sent by clients as a matter of course, and about nothing that this server does.
MEANINGLESS = frozenset({"store", "metadata", "service_tier", "safety_identifier"})

# What a template is rendered with belongs to the server, the program that it is above all.
RESERVED_FOR_TEMPLATES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip

# Part of the dialects and not acting yet: the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}

Count = Annotated[int, Meta(ge=1)]
Factor = Annotated[float, Meta(gt=0, le=100)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What all generation dialects of OpenAI share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Factor | None = None
    repeat_penalty: Factor | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    seed: int | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    ignore_eos: bool = False
    user: str | None = None
    cache_prompt: bool = True
    cache_salt: Name = ""
    prompt_cache_key: Name = ""

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        self.stops()

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError for an empty one, which would stop everything."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise RequestError("stop: an empty string would end every answer before it begins", param="stop")
        return stops

    def sampling(self, default: Sampling) -> Sampling:
        """What was asked over what holds where nothing was; -1 means off for top_k and "any" for seed.

        Raises RequestError where one thing is asked for by two names and differs.
        """
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise RequestError(
                "repetition_penalty and repeat_penalty differ; send one of them", param="repeat_penalty"
            )
        asked: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty
            if self.repetition_penalty is None
            else self.repetition_penalty,
            "repeat_last_n": self.repeat_last_n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": tuple(self.logit_bias.items()) or None,
            "seed": self.seed,
        }
        merged = dataclasses.replace(default, **{name: v for name, v in asked.items() if v is not None})
        return dataclasses.replace(merged, seed=None) if merged.seed == -1 else merged

    def bound(self) -> int | None:
        """Most new tokens, or None."""
        return self.max_tokens


class ToolFunction(msgspec.Struct):
    name: str


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: ToolFunction


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: CalledFunction
    type: Literal["function"] | None = None
    id: str | None = None


class Message(msgspec.Struct):
    """The shape that every message must have; fields beyond it are the template's business."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`. `messages` and `tools` stay as they came: the template reads them."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        """Hold messages and tools against their shapes. Raises RequestError or NotSupported."""
        super().check()
        for index, message in enumerate(self.messages):
            _check_message(index, message)
        if self.tool_choice not in ("auto", "none"):
            raise RequestError(
                'tool_choice: only "auto" and "none" are supported here: a call cannot be forced',
                param="tool_choice",
            )
        for index, tool in enumerate(self.tools):
            _convert(tool, Tool, f"tools[{index}]")
        if reserved := sorted(RESERVED_FOR_TEMPLATES & self.chat_template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs: {reserved[0]} is not the request's to set", param="chat_template_kwargs"
            )
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")

    def bound(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt. Raises RequestError where there is none, or a mixture."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt: there is nothing to continue", param="prompt")
        if len({type(item) for item in prompt}) > 1:
            raise RequestError(
                "prompt: a list holds texts, token ids or lists of ids, not a mixture", param="prompt"
            )
        if isinstance(prompt[0], int):
            return [[item for item in prompt if isinstance(item, int)]]
        return [item for item in prompt if not isinstance(item, int)]


Body = TypeVar("Body", bound=msgspec.Struct)


def neutral_of(body_type: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """The fields of the type's dialect that do not act, with the values of them that ask for nothing."""
    neutral: Mapping[str, tuple[Any, ...]] = getattr(body_type, "NEUTRAL", NEUTRAL)
    return neutral


def parse(data: bytes, body_type: type[Body]) -> Body:
    """The typed body. Raises RequestError that names the field at fault."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise RequestError(f"the body is not JSON: {fault}") from fault
    except RecursionError as fault:
        raise RequestError("the body is nested too deeply") from fault
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    check_limits(raw)
    neutral = neutral_of(body_type)
    known = {field.encode_name for field in msgspec.structs.fields(body_type)}
    given = {}
    for name, value in raw.items():
        if value is None or name in MEANINGLESS:
            continue
        if name in known:
            given[name] = value
        elif name not in neutral:
            raise RequestError(_unknown(name, known), param=name[:MAX_ECHOED])
        elif not any(_same(value, accepted) for accepted in neutral[name]):
            accepted = " or ".join(msgspec.json.encode(accepted).decode() for accepted in neutral[name])
            but = f"; only {accepted} is accepted" if accepted else ""
            raise RequestError(f"{name} is not supported here{but}", param=name)
    return _convert(given, body_type, "")


def _same(value: Any, neutral: Any) -> bool:
    """Equality as in JSON, where false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: set[str]) -> str:
    name = name[:MAX_ECHOED]
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _convert(value: Any, kind: type[Body], where: str) -> Body:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as fault:
        message, _, place = str(fault).partition(" - at `")  # "`$.stop[0]`", or "`key in $.logit_bias`"
        param = (where + place.rpartition("$")[2].rstrip("`")).lstrip(".")
        raise RequestError(f"{param}: {message}" if param else message, param=param) from fault
    except RecursionError as fault:
        raise RequestError("the body is nested too deeply") from fault


def _check_message(index: int, message: dict[str, Any]) -> None:
    where = f"messages[{index}]"
    content = _convert(message, Message, where).content
    if not isinstance(content, list):
        return
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind != "text":
            raise NotSupported(
                f"{where}.content[{number}]: parts of type {kind!r} cannot be read here", param=where
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{number}]: a text part needs a text", param=where)
