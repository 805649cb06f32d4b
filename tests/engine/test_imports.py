"""What transformers knows of its own files is kept, and is the same whether it was kept or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.imports import kept

FOUND = {frozenset(): {"a.model": {"A", "B"}}, frozenset({"torch"}): {"b.model": {"C"}}}
WITH_PREFIX = {frozenset(): {"models.a.model": {"A", "B"}}, frozenset({"torch"}): {"models.b.model": {"C"}}}
TELL = """
import importlib.util, pathlib, sys
{first}
import transformers
from transformers.utils import import_utils
folder = pathlib.Path(transformers.__file__).parent / "models"
print(sorted((sorted(needs), name, sorted(of)) for prefix in (None, "models")
             for needs, names in import_utils.define_import_structure(folder, prefix=prefix).items()
             for name, of in names.items() if prefix is None or name.startswith("models.")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "__init__.py").touch()
    return tmp_path / "models"


def test_a_folder_is_looked_through_once(folder: Path, tmp_path: Path) -> None:
    asked = []

    def define(path, prefix=None):
        asked.append((path, prefix))
        return FOUND

    place = tmp_path / "place"
    for _ in range(2):
        defined = kept(define, folder, place)
        assert defined(folder / "__init__.py") == FOUND
        assert defined(str(folder), prefix="models") == WITH_PREFIX
    assert asked == [(folder, None)]
    assert defined(folder / "a" / "__init__.py", prefix="p") == FOUND
    assert asked[1:] == [(folder / "a" / "__init__.py", "p")]
    os.utime(folder / "__init__.py", ns=(1, 1))  # as another installation has it
    kept(define, folder, place)(folder)
    assert asked[2:] == [(folder, None)]


@pytest.mark.parametrize("there", ["", "{", "[]", "[[1, 2]]", '{"a": 1}', "[[[], {}], 1]"])
def test_what_cannot_be_read_or_written_is_found_again(folder: Path, tmp_path: Path, there: str) -> None:
    place = tmp_path / "place"
    kept(lambda path: FOUND, folder, place)(folder)
    [file] = place.iterdir()
    file.write_text(there)
    found = kept(lambda path: FOUND, folder, place)(folder)
    assert found == ({} if there == "[]" else FOUND)
    (tmp_path / "file").touch()
    assert kept(lambda path: FOUND, folder, tmp_path / "file" / "place")(folder) == FOUND


def test_it_is_what_transformers_finds_itself(tmp_path: Path) -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", TELL.format(first=first)],
            env={**os.environ, "MLXCEL_HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
        ).stdout
        for first in ("", "import engine", "import engine")
    ]  # fmt: skip
    assert told[0] == told[1] == told[2] != "[]\n"
    assert len(list((tmp_path / "imports").iterdir())) == 1
