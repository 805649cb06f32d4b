"""The arguments and options that several commands share and that are no settings of the server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mlxcel_cli import names, unicode


def _whole(value: Any) -> Any:
    """A text, or each of several, as it was given. Raises BadParameter where it is none."""
    for text in value if isinstance(value, list) else [value or ""]:
        if (fault := unicode.fault(text)) is not None:
            raise typer.BadParameter(f"it is not UTF-8 text: {fault[1]}")
    return value


MODEL_HELP = "a folder, a .gguf file, owner/name, or a built-in name [default: $MLXCEL_MODEL, else smollm2-135m]"

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=names.known)]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="the same as MODEL", autocompletion=names.known),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="settings in place of ~/.config/mlxcel/config.toml")
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="the prompt; stdin is added to it", callback=_whole),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="the system prompt", callback=_whole)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", metavar="N", min=-1, help="new tokens at most; -1: to the end of sequence or context"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="end the answer before this text (repeatable)", callback=_whole),
]
JsonSchemaFile = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="hold the answer to the JSON schema in FILE"),
]
Files = Annotated[
    list[str] | None,
    typer.Option("--file", "-f", metavar="PATH", help="put this file's text into the prompt (repeatable)"),
]
TemplateName = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="NAME",
        help="the prompt, system prompt, model and options kept under NAME",
        autocompletion=names.templates,
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=TEXT",
        help="what $NAME stands for in the template (repeatable)",
        callback=_whole,
    ),
]
SaveTemplate = Annotated[
    str | None,
    typer.Option("--save-template", metavar="NAME", help="keep -p, -s, the model and the options, and exit"),
]
Session = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="NAME",
        help="go on with the chat of this name, or begin it",
        autocompletion=names.sessions,
    ),
]
Continue = Annotated[bool, typer.Option("--continue", help="go on with the last chat")]
NoSession = Annotated[bool, typer.Option("--no-session", help="do not keep this chat")]
Server = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help="ask a running server: http://HOST:PORT or a path ending in .sock"
    ),
]
ShowReasoning = Annotated[
    bool, typer.Option("--show-reasoning", help="show what the model thinks before it answers, on stderr")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="TEXT", help="the key that the server at --server asks for")
]
Stats = Annotated[bool, typer.Option("--stats", help="tokens, rates and time to the first token, on stderr")]
