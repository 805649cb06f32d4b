"""Adapters as clients mount and unmount them: folders below one that the server was given, beside a model.

What is mounted stays in the model's configuration, so that it is there again when the model is loaded again. What
is unmounted is refused at once; the engine keeps its weights for the requests that run with it.
"""

import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.types import Receive

from engine.errors import AdapterError, AdapterNotFound, ConfigError
from server.config import ServerConfig
from server.models import Models, Served
from server.validate import MAX_ECHOED, Name

if TYPE_CHECKING:
    from engine.adapters.mounts import Mounted

FOLDER_HINT = "--adapter-dir FOLDER lets clients mount what is in it; --adapters mounts at the start"


class AdapterBody(msgspec.Struct, kw_only=True):
    """What `POST /v1/adapters` takes: `path` is below the server's folder of adapters."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: Name = ""


def check_folders(config: ServerConfig) -> None:
    """Raise ConfigError for a folder that `config` names and that is not there."""
    named = [("adapters", folder) for folder in config.engine.mounts.values()]
    for setting, folder in [*named, *([("adapter_dir", config.adapter_dir)] if config.adapter_dir else [])]:
        if not os.path.isdir(folder):
            raise ConfigError(setting, f"{setting}: there is no folder {folder}")


def folder_below(root: Path | None, path: str) -> Path:
    """The folder `path` below `root`. Raises AdapterError where there is no root, or the path leads out of it,
    itself or by what is in it.
    """
    if root is None:
        raise AdapterError(
            "no adapter can be mounted from here: the server has no --adapter-dir", hint=FOLDER_HINT
        )
    shown = path[:MAX_ECHOED]
    try:
        whole = root.resolve(strict=True)
        folder = (whole / path).resolve(strict=True)
        inside = [folder, *(each.resolve() for each in folder.iterdir())]
    except (OSError, ValueError, RuntimeError) as fault:
        raise AdapterError(f"there is no folder {shown!r} in the adapter folder") from fault
    if folder == whole or not all(each.is_relative_to(whole) for each in inside):
        raise AdapterError(f"{shown!r} is not a folder within the adapter folder")
    return folder


async def mount(models: Models, served: Served, body: AdapterBody, root: Path | None, receive: Receive) -> Served:
    """Mount an adapter beside the model `served`, which is loaded for that; what requests choose from then on.

    Raises AdapterError, and what keeps the model from being there.
    """
    base = served.base
    if body.name in base.names:
        raise AdapterError(f"{body.name} is the model's own name, and no adapter of it can have that")
    folder = folder_below(root, body.path)
    async with models.leased(base, receive):
        await base.bridge.mount(body.name, folder)
        return models.keep_adapter(base, body.name, folder)


async def unmount(models: Models, served: Served) -> None:
    """Take the adapter of `served` away from those that come; its model is not loaded for that, nor waited for.

    Raises AdapterNotFound for a model without one.
    """
    if not served.adapter:
        listed = ", ".join(served.base.adapted) or "none"
        raise AdapterNotFound(f"{served.name} is a model and no adapter; mounted: {listed}")
    await models.drop_adapter(served)


async def described(served: Served) -> list[dict[str, Any]]:
    """What is mounted beside the model; how large it is, where the model is loaded."""
    loaded: Mapping[str, Mounted | AdapterError] = {}
    if served.bridge.model_now is not None:
        loaded = await served.bridge.mounted()
    return [entry(served, one, loaded.get(name)) for name, one in served.adapted.items()]


def entry(base: Served, one: Served, mounted: "Mounted | AdapterError | None") -> dict[str, Any]:
    """One adapter as listings have it."""
    path = base.engine.mounts[one.adapter]
    said = {"id": one.name, "object": "adapter", "name": one.adapter, "parent": base.name, "path": str(path)}
    if mounted is None:
        return said
    if isinstance(mounted, AdapterError):
        return said | {"error": str(mounted)}
    return said | {"rank": mounted.rank, "layers": mounted.num_layers, "bytes": mounted.num_bytes}
