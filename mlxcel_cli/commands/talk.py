"""`mlxcel run`, `chat` and `generate`: clients of a server in this process, or of one that runs already."""

import json
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from engine.config import GREEDY
from engine.errors import UserError
from mlxcel_cli import checkpoint, config, files, render
from mlxcel_cli.asked import FIELDS
from mlxcel_cli.commands.options import (
    ApiKey,
    ConfigFile,
    Continue,
    Files,
    JsonSchemaFile,
    MaxTokens,
    Model,
    ModelOption,
    NoSession,
    Parameters,
    Prompt,
    SaveTemplate,
    Server,
    Session,
    ShowReasoning,
    Stats,
    Stop,
    System,
    TemplateName,
)
from mlxcel_cli.errors import WrongUsage
from mlxcel_cli.templates import Template
from server.config import ServerConfig

RUN_EXAMPLE = """\b
Examples:
  mlxcel run -p "What is the capital of France?"
  git diff | mlxcel run -m ./my-model -s "You review code." -p "Review this:"
  mlxcel run -p "Name a person." --json-schema person.json
  mlxcel run -f main.py -f notes.txt -p "What does the note say of the code?"
  mlxcel run -s "You review code." --save-template review
  git diff | mlxcel run --template review
  mlxcel run --server http://127.0.0.1:8080 -p Hello --stats

\b
Exit codes: 0 answered, 1 failed (what was refused, a server that is gone, JSON
that was cut), 2 wrong usage, 130 stopped by Ctrl-C. A chat that was piped ends
with 1 when one of its turns failed.
"""
CHAT_EXAMPLE = """\b
Examples:
  mlxcel chat
  mlxcel chat smollm2-135m -s "Answer in one sentence." --temp 0.7
  mlxcel chat --continue
  mlxcel chat --session work
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
    file: Files = None,
    system: System = None,
    template: TemplateName = None,
    param: Parameters = None,
    save_template: SaveTemplate = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    json_schema: JsonSchemaFile = None,
    session: Session = None,
    goes_on: Continue = False,
    no_session: NoSession = False,
    server: Server = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    show_reasoning: ShowReasoning = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Answer one prompt and exit; without -p, without -f and without piped stdin: chat."""
    model = checkpoint.named(model, model_option)
    asked = _asked(flags, max_tokens=max_tokens, stop=stop, json_schema=json_schema)
    if save_template is not None:
        given = {"--file": file, "--template": template, "--param": param, "--json-schema": json_schema}
        _save(Template(save_template, system, prompt, model, asked=asked), given)
        return
    spoken = _spoken(_template(template), param, system=system, prompt=prompt, names=file or ())
    kept = _kept(session, goes_on=goes_on, no_session=no_session)
    common = _common(
        model or spoken.model,
        server,
        flags,
        {**spoken.asked, **asked},
        key=api_key,
        max_tokens=max_tokens,
        file=config_file,
        once=spoken.prompt is not None,
    )
    common |= kept | _bounded_by(max_tokens, template)

    from mlxcel_cli import session as talks

    reasoning = "show" if show_reasoning else None
    talk = talks.Talk(**common, system=spoken.system, stats=stats, reasoning=reasoning)
    code = talks.converse(talk) if spoken.prompt is None else talks.answer_once(talk, spoken.prompt)
    raise typer.Exit(code)


@config.takes(*OWN_SERVER, request=tuple(FIELDS))
def chat(
    model: Model = None,
    model_option: ModelOption = None,
    system: System = None,
    template: TemplateName = None,
    param: Parameters = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    json_schema: JsonSchemaFile = None,
    session: Session = None,
    goes_on: Continue = False,
    no_session: NoSession = False,
    server: Server = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    show_reasoning: ShowReasoning = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Chat with a model; /help lists what the loop understands."""
    model = checkpoint.named(model, model_option)
    asked = _asked(flags, max_tokens=max_tokens, stop=stop, json_schema=json_schema)
    known = _template(template)
    if known.prompt is not None:
        raise WrongUsage(f"template {template} has a prompt of its own", hint=f"mlxcel run --template {template}")
    filled, _ = known.filled(None, _parameters(param, known))
    kept = _kept(session, goes_on=goes_on, no_session=no_session)
    common = _common(
        model or known.model,
        server,
        flags,
        {**known.asked, **asked},
        key=api_key,
        max_tokens=max_tokens,
        file=config_file,
    )
    common |= kept | _bounded_by(max_tokens, template)

    from mlxcel_cli import session as talks

    reasoning = "show" if show_reasoning else None
    talk = talks.Talk(**common, system=system or filled, stats=stats, reasoning=reasoning)
    raise typer.Exit(talks.converse(talk))


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
    asked = _asked(flags, max_tokens=max_tokens, stop=stop)
    common = _common(model, server, flags, asked, key=api_key, max_tokens=max_tokens, file=config_file, once=True)

    from mlxcel_cli import session

    raise typer.Exit(session.continue_text(session.Talk(**common, stats=stats), text))


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What a template, flags, files and stdin say together; `prompt` is None where a terminal is to be asked."""

    prompt: str | None
    system: str | None
    model: str | None
    asked: Mapping[str, Any]


def _spoken(
    template: Template,
    parameters: Sequence[str] | None,
    *,
    system: str | None,
    prompt: str | None,
    names: Sequence[str],
) -> _Spoken:
    """The files called `names` come before the prompt, and all of it where the template has its $input."""
    values = _parameters(parameters, template)
    quotes = [files.quote(name, may_wait=True) for name in names]
    speaks = bool(quotes) or (template.prompt is not None and not template.takes_input)
    said = _prompt_text(prompt, needed=not speaks)
    if said is not None or quotes:
        said = files.before(said or "", quotes)
    if said is None and template.prompt is None and not template.takes_input:
        filled, text = template.filled(None, values)[0], None
    else:
        filled, text = template.filled(said, values)
    return _Spoken(text, system or filled, template.model, template.asked)


def _template(name: str | None) -> Template:
    """The template of that name; without a name, one that says nothing."""
    if name is None:
        return Template("")

    from mlxcel_cli import templates

    return templates.read(name, config.templates_dir())


def _parameters(given: Sequence[str] | None, template: Template) -> dict[str, str]:
    """The values of a template's variables."""
    if given and not template.name:
        raise WrongUsage("--param is for a template", hint="--template NAME")
    values = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise WrongUsage(f"--param {text}: no variable and text", hint="--param NAME=TEXT")
        values[name] = value
    return values


def _save(template: Template, given: Mapping[str, Any]) -> None:
    """Keep what the flags say as a template; `given` are flags that none has room for, by name."""
    from mlxcel_cli import templates

    for flag, value in given.items():
        if value is not None:
            raise WrongUsage(f"{flag} is not kept in a template", hint="leave it out with --save-template")
    if not (template.prompt or template.system or template.model or template.asked):
        raise WrongUsage("there is nothing to keep", hint="give -p, -s, -m or options such as --temp")
    path = templates.write(template.name, config.templates_dir(), template)
    render.note(f"(written to {path})")


def _kept(name: str | None, *, goes_on: bool, no_session: bool) -> dict[str, Any]:
    """Which chat is gone on with, and whether a new one is kept: parts of a Talk."""
    if name is not None and goes_on:
        raise WrongUsage("--session and --continue name two chats", hint="give one of them")
    if no_session and (name is not None or goes_on):
        raise WrongUsage("--no-session keeps nothing, and the other flag does", hint="give one of them")
    if name is None and not goes_on:
        return {"keeps": not no_session}

    from mlxcel_cli import chats

    return {"kept": chats.kept(config.sessions_dir(), name, goes_on=goes_on)}


def _bounded_by(max_tokens: int | None, template: str | None) -> dict[str, str]:
    """Where a bound of new tokens was said, if anywhere: a part of a Talk."""
    return {} if max_tokens is not None or template is None else {"bounded_by": f"template {template}: max_tokens"}


def _prompt_text(prompt: str | None, *, needed: bool = True) -> str | None:
    """The prompt of the flag and of stdin, a blank line between them.

    None where a terminal is to be asked, or where there is none and none is `needed`.
    """
    from mlxcel_cli.lines import text_of

    if sys.stdin is None or sys.stdin.closed:
        piped = ""
    elif sys.stdin.isatty():
        if prompt == "" and needed:
            raise WrongUsage("there is no prompt: -p is empty", hint="without -p the terminal asks for one")
        return prompt
    else:
        if (prompt is not None or not needed) and not select.select([sys.stdin], [], [], STDIN_SILENCE_S)[0]:
            render.note("waiting for the rest of the prompt on stdin (< /dev/null: there is none)")
        piped = text_of(sys.stdin.buffer.read()).removesuffix("\n")
    if not piped.strip():
        if not prompt and needed:
            where = "stdin" if prompt is None else "-p"
            raise WrongUsage(f"there is no prompt: {where} is empty", hint="give one with -p TEXT")
        return prompt
    return piped if not prompt else f"{prompt}\n\n{piped}"


def _asked(
    flags: Mapping[str, Any],
    *,
    max_tokens: int | None,
    stop: list[str] | None,
    json_schema: Path | None = None,
) -> dict[str, Any]:
    """The fields of a request that were given."""
    given = config.finite(flags)
    asked: dict[str, Any] = {wire: given[name] for name, wire in FIELDS.items() if name in given}
    if max_tokens is not None and max_tokens >= 0:
        asked["max_tokens"] = max_tokens
    if stop:
        asked["stop"] = stop
    if json_schema is not None:
        asked["response_format"] = _schema_format(json_schema)
    return asked


def _common(
    model: str | None,
    address: str | None,
    flags: Mapping[str, Any],
    asked: dict[str, Any],
    *,
    key: str | None,
    max_tokens: int | None,
    file: Path | None,
    once: bool = False,
) -> dict[str, Any]:
    """What the commands share of a Talk: where it goes, the model's name there, the fields that were `asked`.

    `once`: there is one request, so that nothing need be kept for the next.
    """
    given = config.finite(flags)
    if max_tokens == -1:
        asked.pop("max_tokens", None)
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
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()  # Python reads more than JSON has
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
    # Settings for several requests are none of a talk's: its model is the one that it names.
    fixed = {"parallel": 1, "fallback_sampling": GREEDY, "adapters": ()} | (
        {"no_prompt_cache": True} if once else {}
    )
    engine = settings.engine(Path(reference), **fixed)
    return checkpoint.in_place(ServerConfig(engine=engine, model_id=reference))
