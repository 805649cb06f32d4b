"""`mlxcel bench`: how fast a model is in this process; `mlxcel bench serve`: how a server bears load."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import UserError
from mlxcel_cli import checkpoint, config, names, render
from mlxcel_cli.bench.mixes import Mix
from mlxcel_cli.commands.options import ConfigFile, ModelOption
from mlxcel_cli.errors import WrongUsage

if TYPE_CHECKING:
    from mlxcel_cli.bench.serve import Plan, Target
    from mlxcel_cli.bench.speed import Sizes

EXAMPLE = """\b
Examples:
  mlxcel bench smollm2-135m --prompts 128,1024 --batches 1,8
  mlxcel bench smollm2-135m --json > speed.json
  mlxcel bench serve --url http://127.0.0.1:8080 --clients 8 --html load.html
  mlxcel bench serve --url http://127.0.0.1:8080 --rate 2 --mix shared-prefix --slo ttft=0.5,itl=0.05
  mlxcel bench serve --url http://127.0.0.1:8080 --against http://127.0.0.1:8000 --repeats 3
"""
SERVE = "serve"
URL = "http://127.0.0.1:8080"
OF_ENGINE = (
    *("ctx_size", "threads", "cache_dtype", "decode_storage_backend", "prefill_chunk_size", "kv_cache_budget"),
    *("no_batch", "portable", "trust_remote_code"),
)
OF_SERVE = (
    *("url", "against", "against_model", "against_key", "api_key", "clients", "rate", "requests", "mix", "words"),
    *("seed", "slo", "timeout", "ignore_eos"),
)
OF_SPEED = ("prompts", "batches", "config_file", *OF_ENGINE)
MOST_WORDS = 10**8
LEAST_RATE, MOST_RATE = 0.001, 10**4
NEW_TOKENS = {True: 64, False: 32}
REPEATS = {True: 1, False: 3}


def _offered(incomplete: str) -> list[str]:
    return [*([SERVE] if SERVE.startswith(incomplete) else ()), *names.known(incomplete)]


def _number(*flags_and_help: str, most: int, least: int = 1) -> Any:
    """The option of a whole number within bounds."""
    *flags, said = flags_and_help
    return typer.Option(*flags, metavar="N", min=least, max=most, help=said)


What = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL|serve]",
        help="the model to measure here; serve: load the server at --url in its place",
        show_default=False,
        autocompletion=_offered,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document instead of tables")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page with tables and pictures")]
Repeats = Annotated[int | None, _number("--repeats", "runs of everything [default: 3; serve: 1]", most=1000)]
Warmup = Annotated[
    int | None, _number("--warmup", "runs before, not counted; serve: requests [default: 1]", least=0, most=10**4)
]
NewTokens = Annotated[
    int | None,
    _number("--max-tokens", "-n", "new tokens of each request [default: 32; serve: 64]", least=2, most=1 << 20),
]
Prompts = Annotated[
    str | None, typer.Option("--prompts", metavar="N,N", help="prompt sizes in tokens [default: 128,512]")
]
Batches = Annotated[str | None, typer.Option("--batches", metavar="N,N", help="requests at once [default: 1,4]")]
Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help=f"serve: the server to load [default: {URL}]")
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="URL", help="serve: load this server too, in turn, and give ratios"),
]
AgainstModel = Annotated[
    str | None,
    typer.Option("--against-model", metavar="NAME", help="serve: the model of --against [default: its first]"),
]
Key = Annotated[str | None, typer.Option("--api-key", metavar="TEXT", help="serve: the key that --url asks for")]
AgainstKey = Annotated[
    str | None, typer.Option("--against-key", metavar="TEXT", help="serve: the key that --against asks for")
]
Clients = Annotated[
    int | None, _number("--clients", "serve: clients that each ask again when answered [default: 4]", most=10**4)
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate", metavar="X", help="serve: conversations begun a second, at random (Poisson), however slow"
    ),
]
Requests = Annotated[
    int | None, _number("--requests", "serve: requests of a run [default: 8 a client, or 32]", most=10**5)
]
MixOption = Annotated[
    Mix | None,
    typer.Option("--mix", help="serve: what requests have in common [default: chat]", show_default=False),
]
Words = Annotated[
    int | None,
    _number("--words", "serve: words of the shared prefix (400) or long prompt (700)", least=0, most=10**6),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="serve: draws texts and arrivals [default: another each time]"),
]
Slo = Annotated[
    str | None,
    typer.Option("--slo", metavar="ttft=S,itl=S", help="serve: the objective that goodput counts by; also e2e=S"),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="S", min=0, max=86400, help="serve: seconds a request may take, 0: any [default: 600]"
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="serve: ask for all tokens whatever the model says; not every server can"),
]


@config.takes(*OF_ENGINE)
def bench(
    what: What = None,
    model_option: ModelOption = None,
    as_json: Json = False,
    html: Html = None,
    repeats: Repeats = None,
    warmup: Warmup = None,
    max_tokens: NewTokens = None,
    prompts: Prompts = None,
    batches: Batches = None,
    url: Url = None,
    against: Against = None,
    against_model: AgainstModel = None,
    api_key: Key = None,
    against_key: AgainstKey = None,
    clients: Clients = None,
    rate: Rate = None,
    requests: Requests = None,
    mix: MixOption = None,
    words: Words = None,
    seed: Seed = None,
    slo: Slo = None,
    timeout: Timeout = None,
    ignore_eos: IgnoreEos = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Measure prefill and decode of a model in this process, or, with `serve`, how a server bears load."""
    given = {name: value for name, value in (locals() | flags).items() if value is not None and value is not False}
    serves = what == SERVE
    for name in OF_SPEED if serves else OF_SERVE:
        if name in given:
            flag = "--" + {"config_file": "config"}.get(name, name.replace("_", "-"))
            raise WrongUsage(f"{flag} belongs to mlxcel bench {'MODEL' if serves else 'serve'}")
    if html is not None:
        _check_place(html)
    status = render.Status()
    measured: Coroutine[Any, Any, Any]
    if serves:
        measured = _load(_plan(given), _targets(given), status.show)
    else:
        settings = config.settle(flags, model=checkpoint.named(what, model_option), file=config_file)
        measured = _speed(settings, _sizes(given), status.show)
    try:
        result = asyncio.run(measured)
    finally:
        status.clear()
    _give(result, serves=serves, as_json=as_json, html=html)


def _give(result: Any, *, serves: bool, as_json: bool, html: Path | None) -> None:
    """Show and write what was found; exit with 1 where a server answered nothing."""
    from mlxcel_cli.bench import page, table

    if as_json:
        render.put(json.dumps(result.body(), indent=2) + "\n")
    else:
        (table.show_serve if serves else table.show_speed)(result)
    if html is not None:
        try:
            html.write_text((page.serve_page if serves else page.speed_page)(result), "utf-8")
        except OSError as error:
            raise UserError(f"--html: {html} cannot be written: {error.strerror or error}") from None
        render.note(f"{html} has tables and pictures")
    raise typer.Exit(1 if serves and result.failed else 0)


def _check_place(html: Path) -> None:
    """Raise UserError where the page could not be written once all is measured."""
    if not html.parent.is_dir():
        raise UserError(f"--html: there is no folder {html.parent}")
    if html.is_dir():
        raise UserError(f"--html: {html} is a folder")
    if not os.access(html if html.exists() else html.parent, os.W_OK):
        raise UserError(f"--html: {html} cannot be written")


async def _speed(settings: config.Settings, sizes: "Sizes", tell: Callable[[str], None]) -> Any:
    from mlxcel_cli.bench.result import SpeedResult
    from mlxcel_cli.bench.speed import measure
    from server.config import ServerConfig

    reference = checkpoint.chosen(settings)
    server = checkpoint.in_place(ServerConfig(sizes.engine(settings, Path(reference)), model_id=reference))
    asked = {"new_tokens": sizes.new_tokens, "repeats": sizes.repeats, "warmup": sizes.warmup}
    return SpeedResult(await measure(server, sizes, tell=tell), asked)


async def _load(plan: "Plan", targets: list["Target"], tell: Callable[[str], None]) -> Any:
    from mlxcel_cli.bench.serve import bear

    render.note(
        f"{plan.num_requests} requests to {' and '.join(target.name for target in targets)}, seed {plan.seed}"
    )
    return await bear(plan, targets, tell=tell)


def _sizes(given: dict[str, Any]) -> "Sizes":
    from mlxcel_cli.bench.speed import Sizes

    return Sizes(
        prompts=_numbers("prompts", given.get("prompts", "128,512"), most=1 << 20),
        batches=_numbers("batches", given.get("batches", "1,4"), most=1 << 12),
        new_tokens=given.get("max_tokens", NEW_TOKENS[False]),
        repeats=given.get("repeats", REPEATS[False]),
        warmup=given.get("warmup", 1),
    )


def _numbers(name: str, text: str, *, most: int) -> tuple[int, ...]:
    """The whole numbers between commas, each once, from the least on. Raises WrongUsage."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and 0 < int(part) <= most for part in parts):
        raise WrongUsage(f"--{name} takes whole numbers from 1 to {most} with commas between them, not {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _plan(given: dict[str, Any]) -> "Plan":
    import secrets

    from mlxcel_cli.bench.serve import Plan
    from mlxcel_cli.bench.summary import Objective

    rate = given.get("rate")
    if rate is not None and "clients" in given:
        raise WrongUsage("--clients wait for answers and --rate does not: give one of them")
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise WrongUsage(f"--rate is a number of conversations a second from {LEAST_RATE} to {MOST_RATE}")
    clients = given.get("clients", 4)
    num_requests = given.get("requests", 32 if rate is not None else 8 * clients)
    if num_requests * given.get("words", 0) > MOST_WORDS:
        raise WrongUsage(f"--requests and --words are more than {MOST_WORDS} words together")
    return Plan(
        mix=given.get("mix", Mix.CHAT),
        num_requests=num_requests,
        clients=clients,
        rate=rate,
        max_tokens=given.get("max_tokens", NEW_TOKENS[True]),
        seed=given.get("seed", secrets.randbelow(10**6)),
        num_words=given.get("words"),
        repeats=given.get("repeats", REPEATS[True]),
        warmup=given.get("warmup", 1),
        timeout_s=given.get("timeout", 600.0),
        ignore_eos=given.get("ignore_eos", False),
        objective=Objective.parse(given["slo"]) if "slo" in given else None,
    )


def _targets(given: dict[str, Any]) -> list["Target"]:
    from mlxcel_cli.bench.serve import Target

    targets = [Target(given.get("url", URL), given.get("model_option"), given.get("api_key", ""))]
    if "against" in given:
        targets.append(Target(given["against"], given.get("against_model"), given.get("against_key", "")))
    elif "against_model" in given or "against_key" in given:
        raise WrongUsage("there is no --against that these are for")
    return targets
