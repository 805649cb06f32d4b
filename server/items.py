"""OpenAI's Responses: the body, the items of a conversation, and the chat request that they are.

What was said before comes as items as well, the client's own or those of a response that is kept. Knows no HTTP,
and nothing of events.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from server.bodies import MAX_LOGPROBS, Amount, Count, Share
from server.chat import ChatBody, ReasoningEffort, ToolName
from server.errors import NotSupported
from server.formats import JsonSchema, ResponseFormat
from server.toolchoice import Allowed, AllowedTools, NamedFunction, NamedTool, ToolChoice
from server.validate import MAX_ECHOED, Name, convert

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
Item = dict[str, Any]

# What errors call the fields that a chat request has by other names.
NAMES = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}


class Part(msgspec.Struct):
    """A piece of content; those of an answer that comes back have more fields, which say nothing new."""

    type: str
    text: str | None = None


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part] | None = None
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: None = None
    async_: None = msgspec.field(default=None, name="async")


class OutputItem(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True):
    """A thought; a summary is none. What is encrypted cannot be read, and is never made here."""

    type: Literal["reasoning"]
    content: list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None


KINDS: Mapping[str, type[MessageItem | CallItem | OutputItem | ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str

    def chat(self) -> NamedTool:
        return NamedTool(NamedFunction(self.name))


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)]


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """No summaries are made: `auto` asks for as much as there is."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class EventOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`. `include` of encrypted reasoning is met by reasoning in plain text."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        "prompt_cache_retention": ("in_memory",),
    }

    model: str = ""
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Amount | None = None
    top_p: Share | None = None
    tools: list[Item] = []
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    previous_response_id: str | None = None
    store: bool = True
    metadata: Annotated[dict[str, Name], Meta(max_length=MAX_METADATA)] = {}
    user: str | None = None
    prompt_cache_key: Name = ""
    stream: bool = False
    stream_options: EventOptions | None = None

    def items(self) -> list[Item]:
        """What is new in the conversation."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def chat(self, before: Sequence[Item]) -> ChatBody:
        """The same as a chat request that goes on after the items `before`, and is checked.

        Raises RequestError and NotSupported.
        """
        if not self.input:
            raise RequestError("input: there is nothing to answer", param="input")
        with_logprobs = LOGPROBS in self.include
        if self.top_logprobs and not with_logprobs:
            raise RequestError(
                f"top_logprobs: include must have {LOGPROBS} for there to be any", param="top_logprobs"
            )
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        body = ChatBody(
            model=self.model,
            messages=[*told, *turns_of(before), *turns_of(self.items())],
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools)],
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=_format(self.text.format if self.text else None),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            user=self.user,
            prompt_cache_key=self.prompt_cache_key,
            logprobs=with_logprobs,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
        )
        body.check()
        return body

    def _choice(self) -> ToolChoice:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return choice.chat()
        if isinstance(choice, AllowedChoice):
            return AllowedTools(Allowed(choice.mode, [tool.chat() for tool in choice.tools]))
        return choice

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of what was asked."""
        format_ = self.text.format if self.text else None
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": self.temperature,
            "text": {"format": {"type": "text"} if format_ is None else _repeated(format_)},
            "tool_choice": self.tool_choice,
            "top_logprobs": self.top_logprobs,
            "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in self.tools],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def turns_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """A conversation as chat has it: an assistant's thoughts, text and calls are one turn. Raises RequestError.

    A call that is incomplete was cut while it was written, and is left out: its arguments are no JSON.
    """
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match _typed(item, where):
            case ReasoningItem(content=content):
                turn = _own(turns, "content", "tool_calls")
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(content or (), where)
            case MessageItem(role="assistant", content=content):
                _own(turns, "content", "tool_calls")["content"] = _content(content, where)
            case MessageItem(role=role, content=content):
                turns.append({"role": role, "content": _content(content, where)})
            case CallItem(status="incomplete"):
                _own(turns)
            case CallItem() as call:
                function = {"name": call.name, "arguments": call.arguments}
                made = {"id": call.call_id, "type": "function", "function": function}
                _own(turns).setdefault("tool_calls", []).append(made)
            case OutputItem(call_id=own, output=output):
                turns.append({"role": "tool", "tool_call_id": own, "content": _content(output, where)})
    return turns


def _own(turns: list[dict[str, Any]], *but: str) -> dict[str, Any]:
    """The assistant's turn that an item belongs to: the last, unless there is something of it that ends it."""
    if not turns or turns[-1]["role"] != "assistant" or any(turns[-1].get(name) for name in but):
        turns.append({"role": "assistant", "content": None})
    return turns[-1]


def _typed(item: Item, where: str) -> MessageItem | CallItem | OutputItem | ReasoningItem:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in KINDS:
        raise NotSupported(f"{where}: items of type {str(kind)[:MAX_ECHOED]!r} cannot be read here", param=where)
    return convert(item, KINDS[kind], where)


def _content(content: str | list[Part] | None, where: str) -> str | None:
    return content if content is None or isinstance(content, str) else _text(content, where)


def _text(parts: Sequence[Part], where: str) -> str:
    for number, part in enumerate(parts):
        place = f"{where}.content[{number}]"
        if part.type not in TEXTS:
            raise NotSupported(
                f"{place}: parts of type {part.type[:MAX_ECHOED]!r} cannot be read here", param=place
            )
        if part.text is None:
            raise RequestError(f"{place}: a text part needs a text", param=place)
    return "".join(part.text or "" for part in parts)


def _tool(index: int, tool: Item) -> dict[str, Any]:
    where = f"tools[{index}]"
    kind = tool.get("type")
    if kind != "function":
        raise NotSupported(f"{where}: tools of type {str(kind)[:MAX_ECHOED]!r} cannot be run here", param=where)
    function = convert(tool, FunctionTool, where)
    described = {"description": function.description, "parameters": function.parameters}
    given = {name: value for name, value in described.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **given}}


def _format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    if (asked.schema is not None) != (asked.type == "json_schema"):
        raise RequestError("text.format: json_schema has a schema, and no other type", param="text.format")
    schema = None if asked.schema is None else JsonSchema(asked.schema)
    return ResponseFormat(asked.type, schema)


def _repeated(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    said = {"type": asked.type, "name": asked.name or "", "schema": asked.schema, "strict": asked.strict}
    return said if asked.description is None else {**said, "description": asked.description}
