"""A folder as one executable file: the launcher, the folder's archive, and the trailer that `launcher.c` reads.

The same folder gives the same bytes: names are sorted, and nobody's name and no time is in it.
"""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

MAGIC = b"mlxcel\0\1"
DIGEST_LEN = 16
MEMBER_BYTES = 8 << 20  # of the archive, deflated by one thread
GZIP = 16 + zlib.MAX_WBITS


def write(output: Path, launcher: Path, tree: Path, level: int) -> None:
    """Write the executable `output`, whole or not at all; `level` is zlib's, 1 to 9."""
    whole = packed(tree)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        members = list(threads.map(lambda piece: zlib.compress(piece, level, GZIP), _pieces(whole)))
    digest = hashlib.sha256()
    for member in members:
        digest.update(member)
    partial = output.with_name(output.name + ".part")
    with open(partial, "wb") as file:
        file.write(launcher.read_bytes())
        file.writelines(members)
        file.write(MAGIC + sum(map(len, members)).to_bytes(8, "little"))
        file.write(digest.hexdigest()[:DIGEST_LEN].encode())
    partial.chmod(0o755)
    partial.replace(output)


def packed(tree: Path) -> memoryview:
    """The files and folders of `tree`, as a tar archive in memory. Links are followed."""
    said = BytesIO()
    with tarfile.open(fileobj=said, mode="w", format=tarfile.USTAR_FORMAT, dereference=True) as archive:
        for path in sorted(tree.rglob("*")):
            entry = archive.gettarinfo(str(path), str(path.relative_to(tree)))
            entry.type = tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE  # and no hard link
            entry.size = 0 if path.is_dir() else path.stat().st_size
            entry.mode = 0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = entry.linkname = ""
            if path.is_dir():
                archive.addfile(entry)
            else:
                with open(path, "rb") as file:
                    archive.addfile(entry, file)
    return said.getbuffer()


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(whole), MEMBER_BYTES):
        yield whole[begin : begin + MEMBER_BYTES]
