"""The generated pages are what the code says now."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_families_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / "families.md").read_text() == generate["families_page"](), "run `make docs`"


def test_the_settings_page_is_current():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert (DOCS / "settings.md").read_text() == generate["settings_page"](), "run `make docs`"
