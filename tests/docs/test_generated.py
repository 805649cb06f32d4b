"""The generated pages are what the code says now, and lists written by hand leave nothing out."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command

from docs.api_reference import api_page, fields_of
from docs.cli_reference import cli_page
from docs.draw import figures
from mlxcel_cli.config import OTHER_VARIABLES
from mlxcel_cli.main import build
from mlxcel_cli.slash import COMMANDS
from server.errors import known_errors
from server.openapi import OPERATIONS, ROUTER_OPERATIONS

DOCS = Path(__file__).parents[2] / "docs"
COMPLETIONS = DOCS.parent / "completions"
GENERATED = {"api.md", "cli.md", "families.md", "metrics.md", "settings.md"}


def test_the_page_of_families_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / "families.md").read_text() == generate["families_page"](), "run `make docs`"


def test_the_settings_page_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    page = generate["settings_page"]()
    assert (DOCS / "settings.md").read_text() == page, "run `make docs`"
    assert [name for name in OTHER_VARIABLES if f"`{name}`" not in page] == []


def test_the_page_of_commands_is_current():
    assert (DOCS / "cli.md").read_text() == cli_page(), "run `make docs`"


def test_the_page_of_commands_has_every_flag_that_is_not_hidden():
    sections = dict(re.findall(r"^## mlxcel (\w+)\n(.*?)(?=^## |\Z)", cli_page(), re.MULTILINE | re.DOTALL))
    program = get_command(build([]))
    assert sections.keys() == {name for name, command in program.commands.items() if not command.hidden}
    for name, section in sections.items():
        shown = [one for one in program.commands[name].params if not getattr(one, "hidden", False)]
        flags = [flag for one in shown if one.param_type_name == "option" for flag in one.opts]
        arguments = [one for one in shown if one.param_type_name == "argument"]
        assert flags or arguments, name
        assert section.count("| argument | what it is |") == bool(arguments), name
        assert [flag for flag in flags if f"`{flag}`" not in section] == [], name


def test_commands_below_commands_are_shown_with_their_panels_and_what_is_hidden_is_not():
    app, below = typer.Typer(name="p"), typer.Typer()

    @app.command()
    def one(
        shown: Annotated[
            int, typer.Option(min=1, max=9, rich_help_panel="Numbers", help="how many [default: 3]")
        ] = 3,
        veiled: Annotated[int, typer.Option(hidden=True)] = 0,
    ) -> None:
        """Do it."""

    app.command(hidden=True)(lambda: None)
    app.add_typer(below, name="more")
    below.command("two")(lambda: None)
    below.command("three")(lambda: None)
    page = cli_page(app)
    assert "Numbers:\n\n| option | value | default | what it does |" in page
    assert re.search(r"^\| `--shown` \| `[^`]+`, 1 to 9 \| `3` \| how many \|$", page, re.MULTILINE)
    assert "veiled" not in page
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == ["p", "p one", "p more", "p more two", "p more three"]


def test_the_page_of_commands_is_made_without_anything_heavy():
    found = "sorted({'mlx', 'mlx_lm', 'transformers', 'pydantic', 'starlette'} & sys.modules.keys())"
    program = f"import sys; from docs.cli_reference import cli_page; cli_page(); print({found})"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_page_of_routes_is_current():
    assert (DOCS / "api.md").read_text() == api_page(), "run `make docs`"


def test_the_page_of_routes_has_every_route_and_field_and_code():
    page = api_page()
    for (method, path), operation in {**OPERATIONS, **ROUTER_OPERATIONS}.items():
        assert f"| `{method} {path}`" in page
        fields = operation.body.__struct_fields__ if operation.body else ()
        assert [field for field in fields if f"| `{field}` |" not in page] == []
    assert [known.code for known in known_errors() if known.code and f"| `{known.code}` |" not in page] == []


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody", "NativeCompletionBody"])
def test_what_each_field_of_a_generation_does_is_written_somewhere(body):
    written = "".join(page.read_text() for page in DOCS.glob("*.md") if page.name not in GENERATED)
    assert [field for field in fields_of(body) if f"`{field}" not in written] == []


def test_the_figures_are_current_and_fetch_nothing():
    for file, drawn in figures().items():
        assert (DOCS / "images" / file).read_text() == drawn, "run `make docs`"
        assert not re.search(r"(?i)href|url\((?!#)|@import|<script|<image|font-face", drawn)


def test_the_page_of_metrics_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / "metrics.md").read_text() == generate["metrics_page"](), "run `make docs`"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completions_are_current(shell):
    program = [sys.executable, "-c", "from mlxcel_cli.main import main; main()"]
    environment = {**os.environ, "_MLXCEL_COMPLETE": f"source_{shell}"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert (COMPLETIONS / f"mlxcel.{shell}").read_text() == ended.stdout, "run `make completions`"


def test_the_chat_page_lists_the_commands_that_help_does():
    in_table = re.findall(r"^\| (.*?) \|", (DOCS / "chat.md").read_text(), re.MULTILINE)
    words = {word for cell in in_table for word in re.findall(r"/[a-z?]+", cell)}
    assert words == {word for command in COMMANDS for word in command.words}


def test_the_walk_pictures_every_file_of_the_command_line():
    pictured = set(
        re.findall(r"`(\w+\.py|commands/)`", (DOCS / "walk.md").read_text().partition("command line's files")[2])
    )
    files = {path.name for path in (DOCS.parent / "mlxcel_cli").glob("[a-z]*.py")}
    assert pictured == files | {"commands/"}
