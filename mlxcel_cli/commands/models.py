"""The model store on the command line: pull, list, rm."""

import json
import sys
import time
from typing import Annotated

import typer

from mlxcel_cli import names, render

PULL_EXAMPLE = "Example: mlxcel pull smollm2-135m"
LIST_EXAMPLE = "Example: mlxcel list --json"
REMOVE_EXAMPLE = "Example: mlxcel rm smollm2-135m --yes"


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="a built-in name, owner/name, or a .gguf file", show_default=False, autocompletion=names.known
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="fetch again what is here already")] = False,
) -> None:
    """Fetch a model into the store and print where it lies."""
    from engine.model.pull import pull as fetch
    from engine.model.store import BUILT_IN

    if (built_in := BUILT_IN.get(model)) is not None:
        render.note(f"{built_in.description}. License: {built_in.license}")
    with render.fetching(model) as progress:
        path = fetch(model, force=force, progress=progress)
    render.put(f"{path}\n")


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array instead of a table")] = False,
) -> None:
    """List the models in the store."""
    from engine.model.store import BUILT_IN, Store

    entries = Store().list()
    if as_json:
        fields = ("name", "short_name", "path", "size_bytes", "source", "modified_s")
        rows = [{name: getattr(entry, name) for name in fields} for entry in entries]
        render.put(json.dumps(rows, indent=2, default=str) + "\n")
    elif entries:
        now = time.time()
        cells = [
            (e.short_name, render.size(e.size_bytes), render.age(now - e.modified_s), e.source) for e in entries
        ]
        render.put(render.table([("NAME", "SIZE", "MODIFIED", "SOURCE"), *cells], right=frozenset({1})))
    else:
        render.note("the store is empty")
        render.note(f"hint: mlxcel pull {next(iter(BUILT_IN))}")


def remove(
    model: Annotated[
        str,
        typer.Argument(help="the model's name in `mlxcel list`", show_default=False, autocompletion=names.stored),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete a model from the store."""
    from engine.model.store import Store
    from mlxcel_cli.errors import WrongUsage

    store = Store()
    if not yes and (entry := store.find(model)) is not None:
        if not render.is_terminal(sys.stdin):
            raise WrongUsage(f"rm would delete {entry.name}", hint="--yes says that it may")
        if not render.confirmed(f"Delete {entry.name} ({render.size(entry.size_bytes)})?"):
            raise typer.Exit(1)
    removed = store.remove(model)
    render.note(f"deleted {removed.name} ({render.size(removed.size_bytes)})")
