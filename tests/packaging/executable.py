"""The executable's launcher with something small behind it, and the folders that a program has to itself."""

import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from mlxcel_cli.binary import archive, build

LIBRARIES = "ld-linux-* libc.so.* libm.so.* libdl.so.* libpthread.so.* librt.so.* libresolv.so.* libutil.so.*"
LIBRARIES += " libnss_files.so.* libnss_dns.so.*"


def linked(folder: Path) -> Path:
    """The launcher. Skips the test where it cannot be linked."""
    try:
        return build.link(folder / "launcher")
    except build.CannotBuild as missing:
        pytest.skip(str(missing))


def packed(folder: Path, python: str, **files: str) -> Path:
    """An executable that runs the script `python` in the place of Python; `files` lie beside it."""
    script = folder / "python3"
    script.write_text(python)
    script.chmod(0o755)
    beside = {PurePosixPath(name): text.encode() for name, text in files.items()}
    archive.write(folder / "mlxcel", linked(folder), {PurePosixPath("bin/python3"): script, **beside}, level=1)
    return folder / "mlxcel"


def bare_root(root: Path) -> Path:
    """A root folder with the C library, the null device and a temporary folder, and nothing else."""
    for name in ("dev", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "dev" / "null").touch()
    loader = next(Path("/").glob("lib*/ld-linux-*.so.*"))
    library = next(Path(found) for found in _folders_of_libraries() if (Path(found) / "libc.so.6").exists())
    for pattern in LIBRARIES.split():
        for source in library.glob(pattern):
            _copy(source, root / library.relative_to("/") / source.name)
    _copy(loader, root / loader.relative_to("/"))
    return root


def enter(root: Path) -> list[str]:
    """What stands before a command that has `root` for its root folder. Skips the test where nothing can."""
    chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if chroot is None:
        pytest.skip("chroot is not here")
    command = [chroot, str(root)]
    if os.geteuid() != 0:
        command = ["unshare", "--user", "--map-root-user", *command]
        if subprocess.run([*command[:3], "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("only root may change its root folder here")
    return command


def _folders_of_libraries() -> list[str]:
    said = subprocess.run(["ldd", shutil.which("sh") or "/bin/sh"], capture_output=True, text=True, check=True)
    return [str(Path(word).resolve().parent) for word in said.stdout.split() if "/libc.so." in word]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755)
