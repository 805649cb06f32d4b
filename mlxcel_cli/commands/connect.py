"""`mlxcel connect`: how other programs are told to use a running server."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxcel_cli import config, render
from mlxcel_cli.commands.options import ConfigFile
from mlxcel_cli.errors import WrongUsage

if TYPE_CHECKING:
    from mlxcel_cli.connect.endpoint import Endpoint
    from mlxcel_cli.connect.recipe import File, Recipe

EXAMPLE = """\b
Examples:
  mlxcel connect
  mlxcel connect codex
  mlxcel connect zed --server http://127.0.0.1:8080 --write

The server has to run: URL and model are asked from it. Keys are named by variable and never shown.
"""


def _known(incomplete: str) -> list[str]:
    from mlxcel_cli.connect.recipes import RECIPES

    return [recipe.name for recipe in RECIPES if recipe.name.startswith(incomplete)]


def connect(
    client: Annotated[
        str | None,
        typer.Argument(metavar="CLIENT", help="a client; without it they are listed", autocompletion=_known),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="the server [default: where serve listens]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="one of its models [default: the first]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="TEXT", help="the key to ask with [default: MLXCEL_API_KEY]")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="write it to the client's file, after asking")] = False,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="another file than the client's usual one")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    config_file: ConfigFile = None,
) -> None:
    """Print how a client or an agent is configured for the running server, or write it to the client's file."""
    if client is None:
        _list()
        return
    recipe = _recipe(client)
    if write and recipe.file is None:
        raise WrongUsage(f"there is no file to write for {recipe.title}: {recipe.instead}")
    if (file is not None or yes) and not write:
        raise WrongUsage("--file and --yes are for --write")

    from mlxcel_cli.connect.endpoint import ask

    settings = config.settle({}, file=config_file)
    key = api_key or next(iter(settings.values.get("api_key", ())), "")
    endpoint = asyncio.run(ask(server or settings.address, key=key, model=model))
    if write:
        assert recipe.file is not None, "checked above"
        _write(recipe, recipe.file, file or recipe.file.place(), endpoint, yes=yes)
    else:
        render.put(_text(recipe, endpoint))


def _list() -> None:
    from mlxcel_cli.connect.recipes import RECIPES

    rows = [(recipe.name, recipe.title, str(recipe.file.place()) if recipe.file else "") for recipe in RECIPES]
    render.put(render.table([("CLIENT", "", "FILE (--write)"), *rows]))


def _recipe(name: str) -> "Recipe":
    import difflib

    from mlxcel_cli.connect.recipes import RECIPES

    recipes = {recipe.name: recipe for recipe in RECIPES}
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(recipes)}"
        raise WrongUsage(f"no client is known as {name}", hint=hint)
    return recipes[name]


def _text(recipe: "Recipe", endpoint: "Endpoint") -> str:
    """What a person reads and copies: the file's content, then the lines."""
    from mlxcel_cli.connect.merge import dump

    parts = [f"# {recipe.title}: {recipe.docs}\n"]
    if recipe.file is not None:
        parts.append(f"# in {recipe.file.place()}:\n{dump(recipe.file.kind, recipe.file.whole(endpoint))}")
    lines = recipe.lines(endpoint)
    if lines:
        parts.append("".join(f"{line}\n" for line in lines))
    return "\n".join(parts)


def _write(recipe: "Recipe", file: "File", path: Path, endpoint: "Endpoint", *, yes: bool) -> None:
    """Bring what the client has to know into its file. Raises UserError where that is not safe."""
    from mlxcel_cli.connect.merge import Unsafe, dump, merge, replaced
    from mlxcel_cli.connect.write import write

    by_hand = f"mlxcel connect {recipe.name} prints what to add by hand"
    before = _held(path, by_hand)
    if before is None and not file.is_made:
        raise Unsafe(f"there is no {path}", hint=f"run it where {recipe.title} lies, or give --file")
    content = file.content(endpoint)
    try:
        text = dump(file.kind, file.whole(endpoint)) if before is None else merge(file.kind, before, content)
        gives_way = [] if before is None else replaced(file.kind, before, content)
    except Unsafe as unsafe:
        raise Unsafe(f"{path} is left as it is: {unsafe}", hint=by_hand) from None
    if text == before:
        render.note(f"{path} says so already")
    else:
        render.say(dump(file.kind, file.whole(endpoint) if before is None else content))
        if gives_way:
            render.say(f"other values stand there and give way: {', '.join(sorted(gives_way))}")
        if not yes:
            if not render.is_terminal(sys.stdin):
                raise WrongUsage(f"this would be written to {path}", hint="--yes says that it may")
            if not render.confirmed(f"Write this to {path}?"):
                raise typer.Exit(1)
        try:
            backup = write(path, text, before=before)
        except OSError as error:
            raise Unsafe(f"{path} cannot be written: {error.strerror}", hint=by_hand) from None
        render.note(f"wrote {path}" + (f"; before, it was {backup}" if backup else ""))
    for line in recipe.lines(endpoint):
        render.put(f"{line}\n")


def _held(path: Path, hint: str) -> str | None:
    """What is to be added to; None where there is no file. Raises Unsafe for what cannot be read or replaced."""
    from mlxcel_cli.connect.merge import Unsafe
    from mlxcel_cli.connect.write import is_writable

    try:
        at = path.resolve()
        if not at.exists():
            return None
        if not at.is_file():
            raise Unsafe(f"{path} is no file", hint=hint)
        text = at.read_bytes().decode()
        writable = is_writable(at)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Unsafe(f"{path} cannot be read: {reason}", hint=hint) from None
    if not writable:
        raise Unsafe(f"{path} may only be read: it is left as it is", hint=hint)
    return text
