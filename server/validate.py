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
from engine.request import Grammar, Loops, Sampling
from engine.text.filter import Markup
from engine.text.template import ChatTemplate
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
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "suffix": ("",),
}

MAX_LOGPROBS = 20
MAX_BREAKERS = 16
MAX_BREAKER = 40  # characters, as in llama.cpp
MIN_COUNT = 12  # of a loop, where a request does not say

# Fields whose names and values are those of the engine.
SAME_NAMED = (
    "temperature", "top_p", "min_p", "typical_p", "repeat_last_n", "frequency_penalty", "presence_penalty",
    "xtc_probability", "xtc_threshold", "min_keep", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
    "seed",
)  # fmt: skip

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=100)]
Window = Annotated[int, Meta(ge=-1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER)]
LoopSize = Annotated[int, Meta(ge=0, le=512)]
Factor = Annotated[float, Meta(gt=0, le=100)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
ToolName = Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`strict` changes nothing: a schema is always kept to, or refused."""

    schema: dict[str, Any]
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`schema` beside json_object or json_schema is llama-server's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


def grammar_of(response_format: ResponseFormat | None, grammar: str | None, regex: str | None) -> Grammar | None:
    """What an answer has to look like, by whichever field says it. Raises RequestError where two do."""
    found = []
    if response_format is not None and (asked := _json_grammar(response_format)) is not None:
        found.append(asked)
    if grammar is not None:
        found.append(Grammar("cfg", grammar, param="grammar"))
    if regex is not None:
        found.append(Grammar("regex", regex, param="regex"))
    if len(found) > 1:
        named = " and ".join(one.param.partition(".")[0] for one in found)
        raise RequestError(f"{named}: an answer is held to one of them", param=found[1].param)
    return found[0] if found else None


def _json_grammar(asked: ResponseFormat) -> Grammar | None:
    where = "response_format"
    if asked.json_schema is not None and (asked.type != "json_schema" or asked.schema is not None):
        raise RequestError(f"{where}: json_schema belongs to the type json_schema, alone", param=where)
    if asked.type == "text":
        if asked.schema is not None:
            raise RequestError(f"{where}: a text has no schema", param=where)
        return None
    if asked.json_schema is not None:
        schema, where = asked.json_schema.schema, f"{where}.json_schema.schema"
    elif asked.schema is not None:
        schema, where = asked.schema, f"{where}.schema"
    elif asked.type == "json_schema":
        raise RequestError(f"{where}.json_schema is missing", param=f"{where}.json_schema")
    else:
        schema = {"type": "object"}
    return schema_grammar(schema, param=where)


def schema_grammar(schema: dict[str, Any], *, param: str) -> Grammar:
    """Has an answer be JSON that fits `schema`."""
    return Grammar("json", msgspec.json.encode(schema).decode(), param=param)


class GenerationBody(msgspec.Struct, kw_only=True):
    """What all generation dialects of OpenAI share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Amount | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    min_keep: Annotated[int, Meta(ge=0)] | None = None
    repetition_penalty: Factor | None = None
    repeat_penalty: Factor | None = None
    repeat_last_n: Window | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    dry_multiplier: Amount | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)] | None = None
    dynatemp_range: Amount | None = None
    dynatemp_exponent: Amount | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Amount | None = None
    mirostat_eta: Share | None = None
    seed: int | None = None
    stop: Stop | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    ignore_eos: bool = False
    max_pattern_size: LoopSize | None = None
    min_pattern_size: LoopSize | None = None
    min_count: Annotated[int, Meta(ge=2, le=1000)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    user: str | None = None
    cache_prompt: bool = True
    cache_salt: Name = ""
    prompt_cache_key: Name = ""

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        self.stops()
        if self.constraint() is not None and self.ignore_eos:
            raise RequestError("ignore_eos: a constrained answer ends where its grammar does", param="ignore_eos")

    def constraint(self) -> Grammar | None:
        """What the answer has to look like, or None. Raises RequestError where two fields say it."""
        return grammar_of(self.response_format, self.grammar, self.regex)

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError for an empty one, which would stop everything."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise RequestError("stop: an empty string would end every answer before it begins", param="stop")
        return stops

    def sampling(self, default: Sampling) -> Sampling:
        """What was asked over what holds where nothing was; -1 is off for top_k and top_n_sigma, any for seed.

        Raises RequestError where one thing is asked for by two names and differs.
        """
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise RequestError(
                "repetition_penalty and repeat_penalty differ; send one of them", param="repeat_penalty"
            )
        asked: dict[str, Any] = {name: getattr(self, name) for name in SAME_NAMED}
        asked |= {
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "top_n_sigma": max(self.top_n_sigma, 0.0) if self.top_n_sigma is not None else None,
            "repetition_penalty": self.repeat_penalty
            if self.repetition_penalty is None
            else self.repetition_penalty,
            "dry_sequence_breakers": None
            if self.dry_sequence_breakers is None
            else tuple(self.dry_sequence_breakers),
            "logit_bias": tuple(self.logit_bias.items()) or None,
        }
        merged = dataclasses.replace(default, **{name: v for name, v in asked.items() if v is not None})
        return dataclasses.replace(merged, seed=None) if merged.seed == -1 else merged

    def loops(self, default: Loops | None) -> Loops | None:
        """When an answer ends for going round in circles: what was asked over `default`.

        Raises RequestError for bounds of what is not looked for, or of nothing.
        """
        longest = (
            (default.max_tokens if default else 0) if self.max_pattern_size is None else self.max_pattern_size
        )
        if not longest:
            for name in ("min_pattern_size", "min_count"):
                if getattr(self, name) is not None and self.max_pattern_size is None:
                    raise RequestError(f"{name} bounds loops, which max_pattern_size does not ask for", param=name)
            return None
        shortest = (
            (default.min_tokens if default else 1) if self.min_pattern_size is None else self.min_pattern_size
        )
        if shortest > longest:
            raise RequestError("min_pattern_size is above max_pattern_size", param="min_pattern_size")
        count = (default.count if default else MIN_COUNT) if self.min_count is None else self.min_count
        return Loops(max(shortest, 1), longest, count)

    def num_logprobs(self) -> int | None:
        """How many logprobs are wanted in the place of each token, beside its own; None: not even that."""
        return None

    def bound(self) -> int | None:
        """Most new tokens, or None."""
        return self.max_tokens


class ToolFunction(msgspec.Struct):
    """A function's name, and the schema of its arguments; what else there is is the template's business."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


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
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`. `messages` and `tools` stay as they came: the template reads them."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def check(self) -> None:
        """Hold messages and tools against their shapes. Raises RequestError or NotSupported."""
        super().check()
        for index, message in enumerate(self.messages):
            _check_message(index, message)
        names: set[str] = set()
        for index, tool in enumerate(self.tools):
            name = convert(tool, Tool, f"tools[{index}]").function.name
            if name in names:
                raise RequestError(f"tools[{index}]: there are two tools {name!r}", param=f"tools[{index}]")
            names.add(name)
        self._check_choice(names)
        if reserved := sorted(RESERVED_FOR_TEMPLATES & self.chat_template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs: {reserved[0]} is not the request's to set", param="chat_template_kwargs"
            )
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: logprobs must be true for there to be any", param="top_logprobs")

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _check_choice(self, names: set[str]) -> None:
        """Hold `tool_choice` against the tools of these names."""
        if self.tool_choice in ("auto", "none"):
            return
        named = self._named_tool()
        if named is None and self.tool_choice != "required":
            raise RequestError(
                'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}',
                param="tool_choice",
            )
        if not names or (named is not None and named not in names):
            missing = "there are no tools" if named is None else f"there is no tool {named[:MAX_ECHOED]!r}"
            raise RequestError(f"tool_choice: {missing} that could be called", param="tool_choice")
        if self.constraint() is not None:
            raise RequestError(
                "tool_choice: a call cannot be held to a response_format, grammar or regex", param="tool_choice"
            )

    def _named_tool(self) -> str | None:
        """The tool that `tool_choice` names, in OpenAI's shape."""
        if not isinstance(self.tool_choice, dict) or self.tool_choice.get("type") != "function":
            return None
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def calls_in_parallel(self) -> bool:
        """Whether a forced reply may have several calls: a tool that is named is called once."""
        return self.parallel_tool_calls and self.tool_choice == "required"

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which one has to be called; none where the model may answer as it likes."""
        if self.tool_choice == "required":
            return self.tools
        named = self._named_tool()
        return [tool for tool in self.tools if named is not None and tool["function"]["name"] == named]

    @property
    def thinking_tokens(self) -> int | None:
        """The bound on the reasoning, or None; -1 is none either."""
        return None if self.thinking_budget in (None, -1) else self.thinking_budget

    def template_arguments(self, template: ChatTemplate, markup: Markup) -> dict[str, Any]:
        """What the template is rendered with beside messages and tools.

        Raises RequestError where a field would change nothing, or two say different things.
        """
        arguments = dict(self.chat_template_kwargs)
        effort, thinks = self.reasoning_effort, self.enable_thinking
        if effort is not None and not template.takes("reasoning_effort"):
            if effort != "none":
                raise RequestError(
                    "reasoning_effort: this model's chat template knows no degrees of it", param="reasoning_effort"
                )
            if thinks:
                raise RequestError("reasoning_effort and enable_thinking differ", param="reasoning_effort")
            effort, thinks = None, False
        if thinks is not None and not template.takes("enable_thinking"):
            if thinks or markup.reasons:
                raise RequestError(
                    "enable_thinking: this model's chat template has no such switch",
                    param="enable_thinking" if self.enable_thinking is not None else "reasoning_effort",
                )
            thinks = None
        for name, value in (("reasoning_effort", effort), ("enable_thinking", thinks)):
            if value is None:
                continue
            if arguments.get(name, value) != value:
                raise RequestError(f"{name} and chat_template_kwargs.{name} differ; send one of them", param=name)
            arguments[name] = value
        return arguments

    def bound(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: bool | Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = False
    best_of: Count | None = None

    def check(self) -> None:
        """Raises RequestError."""
        super().check()
        if self.logprobs is True:
            raise RequestError("logprobs: a number says how many are wanted for each token", param="logprobs")
        if self.echo and self.logprobs is not False:
            raise RequestError("echo: logprobs are told of new tokens alone, not of the prompt's", param="echo")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of: every choice is given back here, so only n, {self.n}, is accepted", param="best_of"
            )

    def num_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

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
        if value is None or (name in MEANINGLESS and name not in known):
            continue
        if name in known:
            given[name] = value
        elif name not in neutral:
            raise RequestError(_unknown(name, known), param=name[:MAX_ECHOED])
        elif not any(_same(value, accepted) for accepted in neutral[name]):
            accepted = " or ".join(msgspec.json.encode(accepted).decode() for accepted in neutral[name])
            but = f"; only {accepted} is accepted" if accepted else ""
            raise RequestError(f"{name} is not supported here{but}", param=name)
    return convert(given, body_type, "")


def _same(value: Any, neutral: Any) -> bool:
    """Equality as in JSON, where false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown(name: str, known: set[str]) -> str:
    name = name[:MAX_ECHOED]
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def convert(value: Any, kind: type[Body], where: str) -> Body:
    """`value`, found at `where`, as that type. Raises RequestError that names the place at fault."""
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
    content = convert(message, Message, where).content
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
