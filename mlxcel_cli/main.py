"""The `mlxcel` program: its commands, and how what goes wrong becomes a line and an exit code.

It stays light: nothing here loads MLX, transformers or the terminal toolkit before a command needs it.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from engine.errors import MlxcelError
from mlxcel_cli import config, render
from mlxcel_cli.errors import WrongUsage

FAILED, USAGE, INTERRUPTED = 1, 2, 130
UsageError: Any = typer.BadParameter.__base__
EXAMPLES = """\b
Examples:
  mlxcel run -p "What is the capital of France?"
  mlxcel chat
  mlxcel serve --port 8080
"""

# Each with its module of `commands`, its function and its examples: only what runs is imported.
COMMANDS = {
    "run": ("talk", "run", "RUN_EXAMPLE"),
    "chat": ("talk", "chat", "CHAT_EXAMPLE"),
    "generate": ("talk", "generate", "GENERATE_EXAMPLE"),
    "serve": ("serve", "serve", "EXAMPLE"),
    "pull": ("models", "pull", "PULL_EXAMPLE"),
    "list": ("models", "list_models", "LIST_EXAMPLE"),
    "cp": ("models", "copy", "COPY_EXAMPLE"),
    "rm": ("models", "remove", "REMOVE_EXAMPLE"),
    "convert": ("convert", "convert", "EXAMPLE"),
    "inspect": ("inspect", "inspect", "EXAMPLE"),
    "bench": ("bench", "bench", "EXAMPLE"),
    "doctor": ("doctor", "doctor", "EXAMPLE"),
    "connect": ("connect", "connect", "EXAMPLE"),
    "parity": ("parity", "parity", "EXAMPLE"),
    "cluster": ("cluster", "cluster", "EXAMPLE"),
}

# Flags that are planned but not here yet: whoever knows them from elsewhere is told so.
ARRIVING = frozenset({"--no-warmup"})


class _Group(TyperGroup):
    """Typer loads pydantic (0.1 s) to judge a flag that was left out, unless the flag's default is a bool."""

    def get_help_option(self, ctx: Any) -> Any:
        return _with_bool_default(super().get_help_option(ctx))


class _Command(TyperCommand):
    """As `_Group`."""

    def get_help_option(self, ctx: Any) -> Any:
        return _with_bool_default(super().get_help_option(ctx))


def _with_bool_default(option: Any) -> Any:
    if option is not None:
        option.default = False
    return option


def build(arguments: Sequence[str]) -> typer.Typer:
    """The Typer app for these arguments: with the command that they name, or with every one."""
    names_command = bool(arguments) and not arguments[0].startswith("-")
    app = typer.Typer(
        name="mlxcel",
        cls=_Group,
        add_completion=not names_command,  # its options come before no command and cost as much
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        epilog=EXAMPLES,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(epilog=EXAMPLES)(mlxcel)
    wanted = [arguments[0]] if names_command and arguments[0] in COMMANDS else COMMANDS
    for name in wanted:
        module, command, example = COMMANDS[name]
        commands = importlib.import_module(f"mlxcel_cli.commands.{module}")
        app.command(name, cls=_Command, epilog=getattr(commands, example))(getattr(commands, command))
    return app


def mlxcel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Run and serve language models on MLX."""
    if version:
        from importlib import metadata

        render.put(f"mlxcel {metadata.version('mlxcel')}\n")
    elif context.invoked_subcommand is None:
        render.put(context.get_help() + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry: run one command and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")
    try:
        code = outcome(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as problem:
        if not isinstance(problem, BrokenPipeError):
            render.error(str(problem))
        # stdout may be what failed; what it still holds must not fail again at exit.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    sys.exit(code)


def outcome(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. What a person can mend is said in one line, and a hint."""
    try:
        return build(arguments)(args=arguments, prog_name="mlxcel", standalone_mode=False) or 0
    except UsageError as problem:
        render.error(problem.format_message(), _usage_hint(problem))
        return USAGE
    except WrongUsage as problem:
        render.failure(problem)
        return USAGE
    except MlxcelError as problem:
        render.failure(problem)
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _usage_hint(problem: Any) -> str:
    option = getattr(problem, "option_name", "")
    if option in ARRIVING:
        return f"{option} has not arrived in this version"
    if option.removeprefix("--").replace("-", "_") in config.table():
        return f"{option} is a flag of mlxcel serve"
    command = problem.ctx.command_path if problem.ctx else "mlxcel"
    return f"{command} --help lists what there is"


if __name__ == "__main__":
    main()
