"""`mlxcel run`, `chat` and `generate`: clients of a server in this process, or of one that runs already."""

import json
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from engine.config import GREEDY
from engine.errors import UserError
from mlxcel_cli import checkpoint, config, render
from mlxcel_cli.asked import FIELDS
from mlxcel_cli.commands.options import (
    ApiKey,
    ConfigFile,
    JsonSchemaFile,
    MaxTokens,
    Model,
    ModelOption,
    Prompt,
    Server,
    ShowReasoning,
    Stats,
    Stop,
    System,
)
from mlxcel_cli.errors import WrongUsage
from server.config import ServerConfig

RUN_EXAMPLE = """\b
Examples:
  mlxcel run -p "What is the capital of France?"
  git diff | mlxcel run -m ./my-model -s "You review code." -p "Review this:"
  mlxcel run -p "Name a person." --json-schema person.json
  mlxcel run --server http://127.0.0.1:8080 -p Hello --stats
"""
CHAT_EXAMPLE = """\b
Examples:
  mlxcel chat
  mlxcel chat smollm2-135m -s "Answer in one sentence." --temp 0.7
"""
GENERATE_EXAMPLE = """\b
Examples:
  mlxcel generate -p "Once upon a time" -n 64
  mlxcel generate --stop "." --seed 7 --temp 0.8 < beginning.txt
"""

# Flags of the server in this process.
DRAFTS = ("draft_kind", "draft_model", "draft_block_size")
OWN_SERVER = ("ctx_size", "chat_template", "adapter", "trust_remote_code", *DRAFTS)
STDIN_SILENCE_S = 1.0


@config.takes(*OWN_SERVER, request=tuple(FIELDS))
def run(
    model: Model = None,
    model_option: ModelOption = None,
    prompt: Prompt = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    json_schema: JsonSchemaFile = None,
    server: Server = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    show_reasoning: ShowReasoning = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Answer one prompt and exit; without -p and without piped stdin: chat."""
    text = _prompt_text(prompt)
    model = checkpoint.named(model, model_option)
    common = _common(
        model,
        server,
        flags,
        key=api_key,
        max_tokens=max_tokens,
        stop=stop,
        json_schema=json_schema,
        file=config_file,
        once=text is not None,
    )

    from mlxcel_cli import session

    talk = session.Talk(**common, system=system, stats=stats, show_reasoning=show_reasoning)
    raise typer.Exit(session.converse(talk) if text is None else session.answer_once(talk, text))


@config.takes(*OWN_SERVER, request=tuple(FIELDS))
def chat(
    model: Model = None,
    model_option: ModelOption = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    json_schema: JsonSchemaFile = None,
    server: Server = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    show_reasoning: ShowReasoning = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Chat with a model; /help lists what the loop understands."""
    model = checkpoint.named(model, model_option)
    common = _common(
        model,
        server,
        flags,
        key=api_key,
        max_tokens=max_tokens,
        stop=stop,
        json_schema=json_schema,
        file=config_file,
    )

    from mlxcel_cli import session

    talk = session.Talk(**common, system=system, stats=stats, show_reasoning=show_reasoning)
    raise typer.Exit(session.converse(talk))


@config.takes(*OWN_SERVER, request=tuple(FIELDS))
def generate(
    model: Model = None,
    model_option: ModelOption = None,
    prompt: Prompt = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    server: Server = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Continue a text as it is, without a chat template."""
    text = _prompt_text(prompt)
    if text is None:
        raise WrongUsage("there is nothing to continue", hint="give a text with -p TEXT or on stdin")
    model = checkpoint.named(model, model_option)
    common = _common(
        model, server, flags, key=api_key, max_tokens=max_tokens, stop=stop, file=config_file, once=True
    )

    from mlxcel_cli import session

    raise typer.Exit(session.continue_text(session.Talk(**common, stats=stats), text))


def _prompt_text(prompt: str | None) -> str | None:
    """The prompt of the flag and of stdin, a blank line between them; None where a terminal is to be asked."""
    from mlxcel_cli.lines import text_of

    if sys.stdin is None or sys.stdin.closed:
        piped = ""
    elif sys.stdin.isatty():
        return prompt
    else:
        if prompt is not None and not select.select([sys.stdin], [], [], STDIN_SILENCE_S)[0]:
            render.note("waiting for the rest of the prompt on stdin (< /dev/null: there is none)")
        piped = text_of(sys.stdin.buffer.read()).removesuffix("\n")
    if not piped.strip():
        if prompt is None:
            raise WrongUsage("there is no prompt: stdin is empty", hint="give one with -p TEXT")
        return prompt
    return piped if prompt is None else f"{prompt}\n\n{piped}"


def _common(
    model: str | None,
    address: str | None,
    flags: Mapping[str, Any],
    *,
    key: str | None,
    max_tokens: int | None,
    stop: list[str] | None,
    file: Path | None,
    json_schema: Path | None = None,
    once: bool = False,
) -> dict[str, Any]:
    """What the commands share of a Talk: where it goes, the model's name there, the fields that were given.

    `once`: there is one request, so that nothing need be kept for the next.
    """
    given = config.finite(flags)
    asked: dict[str, Any] = {wire: given[name] for name, wire in FIELDS.items() if name in given}
    if max_tokens is not None and max_tokens >= 0:
        asked["max_tokens"] = max_tokens
    if stop:
        asked["stop"] = stop
    if json_schema is not None:
        asked["response_format"] = _schema_format(json_schema)
    own = {name: given[name] for name in OWN_SERVER if name in given}
    if address is not None:
        if own or file:
            flag = config.table()[next(iter(own))].flags[0] if own else "--config"
            raise WrongUsage(f"{flag} is decided where the server was started", hint="leave it out with --server")
        return {"where": address, "model": model, "asked": asked, "key": key or ""}
    if key is not None:
        raise WrongUsage("--api-key is for the server at --server", hint="a server in this process needs none")
    if max_tokens == -1:
        own["n_predict"] = -1
    where = _own_server(config.settle(own, model=model, file=file), once=once)
    return {"where": where, "model": None, "asked": asked}


def _schema_format(file: Path) -> dict[str, Any]:
    """The response format that holds an answer to the schema in `file`. Raises UserError."""
    try:
        schema = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"the JSON schema {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema {file} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError(f"the JSON schema {file} must be an object")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _own_server(settings: config.Settings, *, once: bool) -> ServerConfig:
    """The server in this process: one slot, and greedy where neither the person nor the checkpoint says."""
    reference = checkpoint.chosen(settings)
    fixed = {"parallel": 1, "fallback_sampling": GREEDY} | ({"no_prompt_cache": True} if once else {})
    engine = settings.engine(Path(reference), **fixed)
    return checkpoint.in_place(ServerConfig(engine=engine, model_id=reference))
