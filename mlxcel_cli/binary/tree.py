"""What the executable carries: a Python, its standard library and the installed program, all its own.

Packages lie in the standard library's folder, which every build of Python searches, wherever it is moved; some
look for a folder `site-packages` elsewhere. What only developers, other systems or other programs use stays out.
"""

import importlib.util
import marshal
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from engine.model.pull import DEFAULT_INDEX
from mlxcel_cli.binary import closure, libraries
from mlxcel_cli.binary.archive import Files

PROGRAM = b"from mlxcel_cli.main import main\n\nmain()\n"

# Of the standard library: tests, other interfaces to a person, and what installs packages.
UNUSED_FOLDERS = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "venv"}
UNUSED_FOLDERS |= {"pydoc_data", "site-packages", "dist-packages", "__pycache__", "sqlite3", "curses", "dbm"}
UNUSED_MODULES = {"turtle", "_tkinter", "nis", "ossaudiodev", "spwd", "_crypt", "readline", "sitecustomize"}
UNUSED_MODULES |= {"_sqlite3", "_dbm", "_gdbm", "_curses", "_curses_panel"}
UNUSED_PREFIXES = ("_test", "_ctypes_test", "xxlimited", "_xxtest")
# Of transformers' models: code for PyTorch, which is not there, and what prepares pictures and sounds for it.
UNUSED_OF_MODELS = (
    *("modeling_", "modular_", "processing_"),
    *("image_processing_", "video_processing_", "feature_extraction_"),
)
# Of packages: what a compiler or a type checker reads.
SOURCES = {".a", ".c", ".cc", ".cpp", ".cuh", ".h", ".hpp", ".pxd", ".pyi", ".pyx", ".cmake", ".lib", ".metal"}


class Clash(Exception):
    """Two files would lie in one place."""


def lay_out(stage: Path, distributions: list[Distribution]) -> tuple[Files, list[str]]:
    """All files, and the names of the libraries that came from this machine.

    In the folder `stage` lie the copies of those that are changed for this.
    """
    home = PurePosixPath(sys.platlibdir, f"python{sys.version_info.major}.{sys.version_info.minor}")
    python = PurePosixPath("bin/python3")
    own = {python: Path(sys._base_executable).resolve()}  # type: ignore[attr-defined]
    own |= {home / place: source for place, source in _standard_library(Path(sysconfig.get_path("stdlib")))}
    files: Files = {**own, PurePosixPath("bin/mlxcel"): PROGRAM, **_default_index()}
    for distribution in distributions:
        for source, place in closure.files(distribution):
            if belongs(place):
                if home / place in files:
                    raise Clash(f"{source} and {files[home / place]!s:.200} would both be {home / place}")
                files[home / place] = source
    objects = {
        place: source for place, source in files.items() if isinstance(source, Path) and libraries.is_elf(source)
    }
    origins = {stage / place: _staged(stage / place, source) for place, source in objects.items()}
    for place in own.keys() & objects.keys():
        libraries.strip(stage / place)
    brought = libraries.gather(stage, stage / python, origins)
    files |= {place: stage / place for place in [*objects, *(PurePosixPath("lib", name) for name in brought)]}
    return files | dict(_compiled(files)), brought


def _default_index() -> Files:
    """Where pip looks by itself, for a program that comes without pip; nothing where the build has none either."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return {}
    return {PurePosixPath(DEFAULT_INDEX): f"[global]\nindex-url = {PyPI.simple_url}\n".encode()}


def belongs(place: PurePosixPath) -> bool:
    """Whether a package's file is used by the program that runs."""
    if place.suffix in SOURCES or place.suffix == ".pth" or {"tests", "include"}.intersection(place.parts[:-1]):
        return False
    of_model = place.parts[:2] == ("transformers", "models") and place.parts[2] != "auto"
    return not (of_model and place.name.startswith(UNUSED_OF_MODELS))


def _standard_library(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    for path in sorted(folder.rglob("*")):
        place = PurePosixPath(path.relative_to(folder))
        if UNUSED_FOLDERS.intersection(place.parts[:-1]) or place.parts[0].startswith("config-"):
            continue
        module = place.name.partition(".")[0]
        if path.is_file() and module not in UNUSED_MODULES and not module.startswith(UNUSED_PREFIXES):
            yield place, path


def _staged(target: Path, source: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755)
    return source


def _compiled(files: Files) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Every module, compiled for an import that compares no times: nothing here is ever edited."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, source in files.items():
            if place.suffix != ".py" or not isinstance(source, Path):
                continue
            text = source.read_bytes()
            try:
                code = compile(text, str(place), "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                continue  # a template of a module, for whoever fills it in
            unchecked = (1).to_bytes(4, "little")
            header = importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(text)
            yield PurePosixPath(importlib.util.cache_from_source(str(place))), header + marshal.dumps(code)
