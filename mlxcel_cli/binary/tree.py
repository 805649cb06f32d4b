"""The folder that the executable carries: a Python, its standard library and the installed program, all its own.

Packages lie in the standard library's folder, which every build of Python searches, wherever it is moved; some
look for a folder `site-packages` elsewhere. What only developers, other systems or other programs use stays out.
"""

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from mlxcel_cli.binary import closure, libraries

PROGRAM = "from mlxcel_cli.main import main\n\nmain()\n"

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


def lay_out(tree: Path, distributions: list[Distribution]) -> list[str]:
    """Fill the folder `tree`; returns the libraries that came from this machine."""
    home = tree / sys.platlibdir / f"python{sys.version_info.major}.{sys.version_info.minor}"
    home.mkdir(parents=True)
    origins: dict[Path, Path] = {}
    python = tree / "bin" / "python3"
    python.parent.mkdir()
    _copy(Path(sys._base_executable).resolve(), python, origins)  # type: ignore[attr-defined]
    (tree / "bin" / "mlxcel").write_text(PROGRAM)
    _copy_standard_library(Path(sysconfig.get_path("stdlib")), home, origins)
    for path in libraries.objects(tree):
        libraries.strip(path)
    for distribution in distributions:
        for source, place in closure.files(distribution):
            if belongs(place):
                _copy(source, home / place, origins)
    brought = libraries.gather(tree, python, origins)
    _compile(home)
    return brought


def _copy_standard_library(source: Path, home: Path, origins: dict[Path, Path]) -> None:
    for path in sorted(source.rglob("*")):
        place = path.relative_to(source)
        if UNUSED_FOLDERS.intersection(place.parts[:-1]) or place.parts[0].startswith("config-"):
            continue
        module = place.name.partition(".")[0]
        if path.is_file() and module not in UNUSED_MODULES and not module.startswith(UNUSED_PREFIXES):
            _copy(path, home / place, origins)


def belongs(place: PurePosixPath) -> bool:
    """Whether a package's file is used by the program that runs."""
    if place.suffix in SOURCES or place.suffix == ".pth" or {"tests", "include"}.intersection(place.parts[:-1]):
        return False
    of_model = place.parts[:2] == ("transformers", "models") and place.parts[2] != "auto"
    return not (of_model and place.name.startswith(UNUSED_OF_MODELS))


def _copy(source: Path, target: Path, origins: dict[Path, Path]) -> None:
    if target.exists():
        raise Clash(f"{source} and {origins.get(target, 'another file')} would both be {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & 0o111 else 0o644)
    origins[target] = source


def _compile(home: Path) -> None:
    """Compile every module, for an import that compares no times: nothing here is ever edited."""
    command = [sys.executable, "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, "-s", str(home), str(home)], check=True)
