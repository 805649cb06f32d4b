"""Names on the command line, of models, chats and templates: which are here, and what a half-typed one may become.

Imports only when asked: completing a word must be quick.
"""

from pathlib import Path


def known(incomplete: str) -> list[str]:
    """What MODEL may become: a built-in name or one in the store. The shell itself adds files and folders."""
    from engine.model.store import Store

    return [name for name in Store().known_names() if name.startswith(incomplete)]


def stored(incomplete: str) -> list[str]:
    """The same, of the store alone."""
    from engine.model.store import Store

    return [entry.short_name for entry in Store().list() if entry.short_name.startswith(incomplete)]


def sessions(incomplete: str) -> list[str]:
    """Which chats are kept."""
    from mlxcel_cli import chats, config

    return [name for name in chats.names(config.sessions_dir()) if name.startswith(incomplete)]


def templates(incomplete: str) -> list[str]:
    """Which templates there are."""
    from mlxcel_cli import config, templates

    return [name for name in templates.names(config.templates_dir()) if name.startswith(incomplete)]


def here(model: str) -> Path:
    """The folder of a checkpoint that is on this machine; nothing is fetched, a GGUF file is imported.

    Raises ModelNotFound, with what to do next as its hint, when it is not here.
    """
    from engine.errors import ModelNotFound
    from engine.model.hub import cached, hub_name
    from engine.model.pull import ensure
    from engine.model.store import BUILT_IN, Store, nearest
    from mlxcel_cli import render

    store = Store()
    if _exists(model) or store.find(model):
        with render.fetching(model) as progress:
            return ensure(model, progress=progress)
    name = hub_name(model)
    if name is not None and (folder := cached(name)) is not None:
        return folder
    near = [] if model in BUILT_IN else nearest(model, store.known_names())
    hint = f"did you mean {' or '.join(near)}?" if near else f"mlxcel pull {model} fetches what can be fetched"
    raise ModelNotFound(f"{model} is not on this machine", hint=hint)


def _exists(model: str) -> bool:
    try:
        return Path(model).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
