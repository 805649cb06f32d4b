"""The generated pages are what the code says now, and lists written by hand leave nothing out."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from docs.api_reference import api_page, fields_of
from docs.cli_reference import cli_page
from docs.draw import figures
from mlxcel_cli.config import OTHER_VARIABLES
from mlxcel_cli.slash import COMMANDS

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


def test_the_page_of_commands_is_made_without_anything_heavy():
    found = "sorted({'mlx', 'mlx_lm', 'transformers', 'pydantic', 'starlette'} & sys.modules.keys())"
    program = f"import sys; from docs.cli_reference import cli_page; cli_page(); print({found})"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_the_page_of_routes_is_current():
    assert (DOCS / "api.md").read_text() == api_page(), "run `make docs`"


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
