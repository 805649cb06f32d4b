"""`mlxcel serve`: the HTTP server for many clients."""

import logging
from pathlib import Path
from typing import Any

import typer

from engine.config import SERVE_SAMPLING, EngineConfig
from engine.ranks.settings import over_ranks
from mlxcel_cli import checkpoint, config, render
from mlxcel_cli.commands.options import ConfigFile, Model, ModelOption
from server.config import ServerConfig

EXAMPLE = """\b
Examples:
  mlxcel serve smollm2-135m --port 8080
  mlxcel serve -m ./my-model --host /tmp/mlxcel.sock
  mlxcel serve --models smollm2-135m,gemma3-270m --models-max 1
  mlx.launch -n 2 -- mlxcel serve ./my-model

Every flag has an environment twin (--ctx-size: MLXCEL_CTX_SIZE) and the same name in the config file.
"""


@config.takes(*config.names_of(ServerConfig), *config.names_of(EngineConfig))
def serve(
    model: Model = None,
    model_option: ModelOption = None,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP to many clients, with OpenAI's routes."""
    settings = config.settle(flags, model=checkpoint.named(model, model_option), file=config_file)
    reference = checkpoint.first(settings)
    ranks = config.launched()
    engine = settings.engine(Path(reference), fallback_sampling=SERVE_SAMPLING, ranks=ranks)
    engine = engine if ranks is None else over_ranks(engine)
    server = checkpoint.in_place(settings.server(reference, engine))

    from server import logs
    from server.run import serve as run_server

    logging.basicConfig(level=server.log_level.upper(), handlers=[logs.handler(server.log_format)])
    say = logging.getLogger(__name__).info if server.log_format == "json" else render.say
    part: Any = None
    if ranks is not None:
        from engine.ranks.join import join

        part = join(server.engine)
        if ranks.rank:
            raise typer.Exit(part.follow())
    options = {} if part is None else {"open_engine": part.open, "guard": part.guard}
    raise typer.Exit(
        run_server(
            server,
            lambda address: say(_said(server, address)),
            **options,
        )
    )


def _said(server: ServerConfig, address: str) -> str:
    if not server.others:
        return f"{server.served_name} is served at {address} once it is loaded"
    names = ", ".join([server.served_name, *(name for name, _ in server.others)])
    return f"{names} are served at {address}, each loaded when a request names it"
