"""Anthropic's Messages: the body, and the chat request that it is.

What acts there acts by the same names here. `cache_control` says what is so anyway: all of a prompt is kept. Knows
no HTTP, and nothing of answers.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from server.bodies import MAX_STOPS, Amount, Count, Share
from server.chat import ChatBody, ReasoningEffort, ToolName
from server.errors import NotSupported
from server.formats import JsonSchema, ResponseFormat
from server.toolchoice import NamedFunction, NamedTool
from server.toolchoice import ToolChoice as OpenAIChoice
from server.validate import Name

# What errors call the fields that a chat request has by other names.
NAMES = {
    "system": "system",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "enable_thinking": "thinking",
    "thinking_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema.schema": "output_config.format.schema",
}


class _Block(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(_Block, tag="thinking"):
    """A signature proves nothing here, and none is asked for."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Never looked into."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Never looked into."""


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Block] | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """`type` is for the tools that Anthropic runs itself; `strict` calls are held to their schema where forced."""

    name: ToolName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """A model that thinks does so unless it is disabled: `enabled` and `adaptive` leave that to it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Name | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str = ""
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The same as a chat request, which is checked. Raises RequestError and NotSupported."""
        thinking, asked = self.thinking, self.output_config or OutputConfig()
        if thinking is not None and thinking.type == "disabled" and thinking.budget_tokens is not None:
            raise RequestError("thinking: what is disabled has no budget_tokens", param="thinking.budget_tokens")
        turns = list(self._turns())
        begins = self._begins()
        if turns[-1]["role"] == "assistant" and not begins and len(turns) > 1:
            del turns[-1]
        body = ChatBody(
            model=self.model,
            messages=turns,
            continue_final_message=begins,
            add_generation_prompt=not begins,
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools)],
            tool_choice=self._choice(),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            enable_thinking=False if thinking is not None and thinking.type == "disabled" else None,
            thinking_budget=None if thinking is None else thinking.budget_tokens,
            reasoning_effort=asked.effort,
            response_format=None
            if asked.format is None
            else ResponseFormat("json_schema", JsonSchema(asked.format.schema)),
            **self._more(),
        )
        body.check()
        return body

    def _more(self) -> dict[str, Any]:
        """What a request for an answer says beside its conversation."""
        return {}

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.system:
            text = self.system if isinstance(self.system, str) else [_part(block) for block in self.system]
            yield {"role": "system", "content": text}
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            if not isinstance(message.content, list):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield _said(message.content, where)
            else:
                yield from _heard(message.role, message.content, where)

    def _begins(self) -> bool:
        """Whether the last turn begins the answer: the assistant's, if something is said in it.

        Raises RequestError where it is none that an answer can go on from.
        """
        last, where = self.messages[-1], f"messages[{len(self.messages) - 1}]"
        if last.role != "assistant":
            return False
        blocks = last.content if isinstance(last.content, list) else []
        said = last.content if isinstance(last.content, str) else ""
        calls = any(isinstance(block, ToolUseBlock) for block in blocks)
        if calls or any(isinstance(block, ThinkingBlock) for block in blocks[-1:]):
            raise RequestError(f"{where}: an answer that is begun ends with text, and calls nothing", param=where)
        text = said + "".join(block.text for block in blocks if isinstance(block, TextBlock))
        if text != text.rstrip():
            raise RequestError(f"{where}: an answer that is begun must not end in white space", param=where)
        return bool(text)

    def _choice(self) -> OpenAIChoice:
        choice = self.tool_choice
        if choice is None:
            return "auto"
        if (choice.name is None) == (choice.type == "tool"):
            raise RequestError("tool_choice: the type tool has a name, and no other", param="tool_choice")
        if choice.name is not None:
            return NamedTool(NamedFunction(choice.name))
        return "none" if choice.type == "none" else "required" if choice.type == "any" else "auto"


class MessagesBody(CountBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count
    stream: bool = False
    temperature: Amount | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] = []
    metadata: Metadata | None = None

    def _more(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "user": self.metadata.user_id if self.metadata else None,
        }


def _tool(index: int, tool: ToolDefinition) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise NotSupported(f"{where}: tools of type {tool.type[:100]!r} cannot be run here", param=where)
    if tool.input_schema is None:
        raise RequestError(f"{where}: input_schema is missing", param=where)
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _part(block: TextBlock) -> dict[str, Any]:
    return {"type": "text", "text": block.text}


def _misplaced(block: msgspec.Struct, where: str) -> RequestError:
    """What is said of a block that cannot be read, or not there."""
    kind = block.__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        return NotSupported(f"{where}: blocks of type {kind!r} cannot be read here", param=where)
    return RequestError(f"{where}: a block of type {kind!r} has no place there", param=where)


def _said(blocks: list[Block], where: str) -> dict[str, Any]:
    """An assistant's turn: thoughts, text and calls, whatever their order."""
    turn: dict[str, Any] = {"role": "assistant", "content": []}
    thoughts, calls = [], []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                turn["content"].append(_part(block))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, f"{where}.content[{number}]")
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _heard(role: str, blocks: list[Block], where: str) -> Iterator[dict[str, Any]]:
    """What the model is told: a turn for each result of a call, and one for each stretch of text."""
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        match block:
            case TextBlock():
                parts.append(_part(block))
            case ToolResultBlock() if role == "user":
                if parts:
                    yield {"role": role, "content": parts}
                    parts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, place)}
            case _:
                raise _misplaced(block, place)
    if parts or not blocks:
        yield {"role": role, "content": parts}


def _result(block: ToolResultBlock, where: str) -> str:
    """The text of a result; that of one that is an error says so."""
    text = block.content or ""
    if not isinstance(text, str):
        for number, part in enumerate(text):
            if not isinstance(part, TextBlock):
                raise _misplaced(part, f"{where}.content[{number}]")
        text = "".join(part.text for part in text if isinstance(part, TextBlock))
    return f"Error: {text}" if block.is_error else text
