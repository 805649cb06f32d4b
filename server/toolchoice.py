"""Which tools an answer may call, and whether it has to: `tool_choice`, in the shape of OpenAI's chat."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The one tool that is called, once."""

    function: NamedFunction


class Allowed(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Those that may be called, of all that the model is told of: the prompt is the same whichever they are."""

    allowed_tools: Allowed


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def names_of(choice: ToolChoice) -> list[str] | None:
    """The names of the tools that a choice picks; None: all of them."""
    match choice:
        case NamedTool(function=function):
            return [function.name]
        case AllowedTools(allowed_tools=allowed):
            return [tool.function.name for tool in allowed.tools]
    return None


def forces(choice: ToolChoice) -> bool:
    """Whether a tool has to be called."""
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)
