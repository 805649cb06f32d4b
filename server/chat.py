"""The body of a chat request, in OpenAI's shape: what every dialect of turns becomes.

`messages` and `tools` stay as they came, since the template reads them, and are held against their shapes.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from engine.request import RESERVED_FOR_TEMPLATES
from engine.text.filter import Markup
from engine.text.forcedcalls import takes_object
from engine.text.template import ChatTemplate, text_of
from server.bodies import MAX_LOGPROBS, Count, GenerationBody
from server.errors import NotSupported
from server.toolchoice import NamedTool, ToolChoice, forces, names_of
from server.validate import MAX_ECHOED, convert

ToolName = Annotated[str, Meta(pattern=r"^(?!.*\s)[\w.:/-]{1,128}$")]  # `$` alone lets a line's end pass
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


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
    tools: list[dict[str, Any]] = []  # noqa: RUF012
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012
    continue_final_message: bool = False
    add_generation_prompt: bool = True
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
        self._check_beginning()
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
        chosen = names_of(self.tool_choice)
        for name in chosen or ():
            if name not in names:
                raise RequestError(
                    f"tool_choice: there is no tool {name[:MAX_ECHOED]!r} that could be called",
                    param="tool_choice",
                )
        if not forces(self.tool_choice):
            return
        if not names:
            raise RequestError("tool_choice: there are no tools that could be called", param="tool_choice")
        if self.constraint() is not None:
            raise RequestError(
                "tool_choice: a call cannot be held to a response_format, grammar or regex", param="tool_choice"
            )
        if self.ignore_eos:
            raise RequestError("ignore_eos: an answer that has to call ends with its call", param="ignore_eos")
        for index, tool in enumerate(self.tools):
            if (chosen is None or tool["function"]["name"] in chosen) and not takes_object(tool):
                where = f"tools[{index}].function.parameters"
                raise RequestError(f"{where}: the arguments of a call are an object", param=where)

    def _check_beginning(self) -> None:
        """Hold the last message against what can be gone on from, if it is to be."""
        where = "continue_final_message"
        if self.continue_final_message == self.add_generation_prompt:
            raise RequestError(f"{where}: true goes with add_generation_prompt false, neither alone", param=where)
        if not self.continue_final_message:
            return
        last = self.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls") or not text_of(last.get("content")).strip():
            raise RequestError(f"{where}: the last message must be the assistant's, of text alone", param=where)
        if forces(self.tool_choice):
            raise RequestError("tool_choice: a text that goes on is no call", param="tool_choice")
        if self.constraint() is not None:
            raise RequestError(
                f"{where}: a text that goes on cannot be held to a response_format, grammar or regex", param=where
            )

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def allowed(self) -> list[dict[str, Any]]:
        """The tools whose calls are calls, of those that the model is told of."""
        names = names_of(self.tool_choice)
        return [tool for tool in self.callable if names is None or tool["function"]["name"] in names]

    @property
    def calls_in_parallel(self) -> bool:
        """Whether a forced reply may have several calls: a tool that is named is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which one has to be called; none where the model may answer as it likes."""
        return self.allowed if forces(self.tool_choice) else []

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
        for name, value in self.chat_template_kwargs.items():
            if template.takes(name):
                continue
            if name != "enable_thinking" or thinks not in (None, value):
                where = f"chat_template_kwargs.{name[:MAX_ECHOED]}"
                raise RequestError(f"{where}: this model's chat template does not ask for it", param=where)
            thinks = bool(arguments.pop(name))
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
                by_effort = self.reasoning_effort is not None and self.enable_thinking is None
                raise RequestError(
                    "enable_thinking: this model's chat template has no such switch",
                    param="reasoning_effort" if by_effort else "enable_thinking",
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
