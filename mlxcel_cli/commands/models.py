"""The model store on the command line: pull, list, cp, rm."""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlxcel_cli import names, render

if TYPE_CHECKING:
    from engine.model.store import Entry

PULL_EXAMPLE = "Example: mlxcel pull smollm2-135m"
LIST_EXAMPLE = "Example: mlxcel list --sort size"
COPY_EXAMPLE = """\b
Example: mlxcel cp smollm2-135m my-model

Both names stay when the other is removed; weights are on the disk once.
"""
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
    sort: Annotated[
        Literal["name", "size", "modified"],
        typer.Option("--sort", help="by name, the largest first, or the newest first"),
    ] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="the other way round")] = False,
) -> None:
    """List the models in the store."""
    from engine.model.store import BUILT_IN, Store

    store = Store()
    entries = _sorted(store.list(), sort, reverse=reverse)
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
        if render.is_terminal(sys.stdout):
            taken = render.size(store.taken_bytes(entries))
            render.note(f"{render.count(len(entries), 'model')}, {taken} on the disk")
    else:
        render.note("the store is empty")
        render.note(f"hint: mlxcel pull {next(iter(BUILT_IN))}")


def _sorted(entries: "Sequence[Entry]", by: str, *, reverse: bool) -> "list[Entry]":
    """`entries`, which come by name, in the order that is asked for."""
    if by == "size":
        ordered = sorted(entries, key=lambda entry: -entry.size_bytes)
    elif by == "modified":
        ordered = sorted(entries, key=lambda entry: -entry.modified_s)
    else:
        ordered = sorted(entries, key=lambda entry: entry.short_name)
    return ordered[::-1] if reverse else ordered


def copy(
    model: Annotated[
        str,
        typer.Argument(help="the model's name in `mlxcel list`", show_default=False, autocompletion=names.stored),
    ],
    name: Annotated[str, typer.Argument(help="its other name", show_default=False)],
) -> None:
    """Give a model in the store a second name."""
    from engine.model.store import Store

    made = Store().copy(model, name)
    render.note(f"copied {model} to {made.short_name} ({render.size(made.size_bytes)})")
    render.put(f"{made.path}\n")


def remove(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="names in `mlxcel list`",
            show_default=False,
            autocompletion=names.stored,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete models from the store."""
    from engine.model.store import Store
    from mlxcel_cli.errors import WrongUsage

    store = Store()
    entries = {entry.name: entry for entry in map(store.look, models)}  # one that is not there: none is deleted
    if not yes:
        if not render.is_terminal(sys.stdin):
            raise WrongUsage(f"rm would delete {_listed(list(entries))}", hint="--yes says that it may")
        if not render.confirmed(f"Delete {_listed([_sized(entry) for entry in entries.values()])}?"):
            raise typer.Exit(1)
    for name in entries:
        render.note(f"deleted {_sized(store.remove(name))}")


def _sized(entry: "Entry") -> str:
    return f"{entry.name} ({render.size(entry.size_bytes)})"


def _listed(said: Sequence[str]) -> str:
    *others, last = said
    return f"{', '.join(others)} and {last}" if others else last
