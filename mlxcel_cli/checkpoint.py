"""Which checkpoint a command means, and fetching it with its progress shown. It does not know what a
checkpoint is."""

import dataclasses
import sys
from pathlib import Path

from mlxcel_cli import config, render
from mlxcel_cli.errors import WrongUsage
from server.config import ServerConfig

STRONGER = "hint: choose a model with -m MODEL or MLXCEL_MODEL; `mlxcel list` shows what is here"


def named(argument: str | None, option: str | None) -> str | None:
    """The one model a command line names. Raises WrongUsage when it names two."""
    if argument and option and argument != option:
        raise WrongUsage(f"two models are named: {argument} and {option}", hint="name it once")
    return argument or option


def first(settings: config.Settings) -> str:
    """The model that a server of several answers by where none is named: the first of them."""
    listed: tuple[str, ...] = settings.values.get("models", ())
    if settings.model or not listed:
        return chosen(settings)
    from engine.model.store import ALL, Store

    if listed[0] != ALL:
        return listed[0]
    if not (entries := Store().list()):
        raise WrongUsage("--models all: the store is empty", hint=f"mlxcel pull {config.BUILT_IN_MODEL}")
    return entries[0].short_name


def chosen(settings: config.Settings) -> str:
    """The model that flags, environment or file name, else the built-in one, said once on a terminal."""
    if settings.model:
        return settings.model
    if render.is_terminal(sys.stderr):
        render.note(f"no model named: using {config.BUILT_IN_MODEL}, small enough for any machine")
        render.note(STRONGER)
    return config.BUILT_IN_MODEL


def in_place(server: ServerConfig) -> ServerConfig:
    """`server` with the folders of the checkpoint that its `model_id` names, of the draft model that it names if
    it does, and of its further models, brought here first where they are not.

    Where it has no further ones, it is a server of one model, and settings for several are refused (ConfigError).
    """
    references = references_of(server)
    engine = dataclasses.replace(server.engine, model=folder(server.model_id))
    if engine.draft_model is not None:
        engine = dataclasses.replace(engine, draft_model=folder(str(engine.draft_model)))
    others = tuple((name, folder(reference)) for name, reference in references)
    return dataclasses.replace(server, engine=engine, others=others, models=server.models if others else ())


def references_of(server: ServerConfig) -> list[tuple[str, str]]:
    """The further models that `server` is to have, each by its name for clients and by what says where it is."""
    from engine.model.store import ALL, Store

    store = Store()
    references = {name: name for name in server.models if name != ALL}
    if ALL in server.models:
        said = {entry.path for name in (server.model_id, *references) if (entry := store.find(name)) is not None}
        references |= {entry.short_name: str(entry.path) for entry in store.list() if entry.path not in said}
    return [item for item in references.items() if server.model_id not in item]


def folder(reference: str) -> Path:
    """The folder of the checkpoint that `reference` names, its progress shown while it is brought here."""
    from engine.model.pull import ensure

    with render.fetching(reference) as progress:
        return ensure(reference, progress=progress)
