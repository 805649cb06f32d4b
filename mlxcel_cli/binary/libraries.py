"""Shared libraries: which ones a tree of files needs from the machine, and how it finds its own instead.

Everything but the C library itself comes along. The executable carries the one path to what comes along, as an
RPATH, which holds for whatever is loaded later too; an object's own RUNPATH would shut it out, so it becomes an
RPATH as well. `patchelf` writes them, `ldd` says where the machine keeps what is missing.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ELF = b"\x7fELF"
GLIBC = re.compile(
    r"(ld-linux.*|linux-vdso|libc|libm|libdl|libpthread|librt|libresolv|libutil|libanl|libmvec)\.so(\.\d+)?"
)
NEEDED_VERSION = re.compile(rb"\0GLIBC_2\.(\d+)(?=\0)")


def objects(tree: Path) -> list[Path]:
    """The ELF files in `tree`."""
    return [path for path in sorted(tree.rglob("*")) if path.is_file() and is_elf(path)]


def is_elf(path: Path) -> bool:
    """Whether the file is a program or library."""
    with open(path, "rb") as file:
        return file.read(4) == ELF


def gather(tree: Path, python: Path, origins: dict[Path, Path]) -> list[str]:
    """Bring into `tree/lib` what its objects need from this machine, and have them find it there.

    `python` is the executable in the tree, `origins` where an object lay, for `ldd`. Returns what was brought.
    """
    library = tree / "lib"
    library.mkdir(exist_ok=True)
    waiting = objects(tree)
    there = {path.name for path in waiting}
    brought: list[str] = []
    while waiting:
        path = waiting.pop()
        here: dict[str, Path] | None = None
        for name in _printed("--print-needed", path):
            if GLIBC.fullmatch(name) or name in there:
                continue
            here = _resolved(origins.get(path, path)) if here is None else here
            if name not in here:
                raise FileNotFoundError(f"{name}, which {path.relative_to(tree)} needs, is not on this machine")
            target = library / name
            shutil.copyfile(here[name], target)
            target.chmod(0o755)
            origins[target] = here[name]
            strip(target)
            there.add(name)
            brought.append(name)
            waiting.append(target)
    for path in objects(tree):
        _settle(path)
    patch("--force-rpath", "--set-rpath", f"$ORIGIN/{os.path.relpath(library, python.parent)}", python)
    return sorted(brought)


def found(program: str) -> str | None:
    """Where a program of this environment or of the machine is."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def strip(path: Path) -> None:
    """Take out what only a debugger reads."""
    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def patch(*arguments: str | Path) -> str:
    """What `patchelf` prints."""
    command = [found("patchelf") or "patchelf", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_glibc(tree: Path) -> str:
    """The oldest C library that has all the functions that the objects in `tree` ask for."""
    versions = (int(minor) for path in objects(tree) for minor in NEEDED_VERSION.findall(path.read_bytes()))
    return f"2.{max(versions, default=0)}"


def _settle(path: Path) -> None:
    """Have an object search beside itself, as it says, and else where the executable does."""
    said = patch("--print-rpath", path).strip()
    if said:
        inside = [folder for folder in said.split(":") if folder.startswith("$ORIGIN")]
        patch(*(("--force-rpath", "--set-rpath", ":".join(inside)) if inside else ("--remove-rpath",)), path)


def _printed(question: str, path: Path) -> Iterator[str]:
    yield from patch(question, path).split()


def _resolved(path: Path) -> dict[str, Path]:
    """Where the dynamic loader finds each library that `path` needs on this machine."""
    said = subprocess.run(["ldd", str(path)], check=True, capture_output=True, text=True).stdout
    return {name: Path(at) for name, at in re.findall(r"(\S+) => (/\S+)", said)}
