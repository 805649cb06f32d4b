"""Files as one executable: the launcher, an archive of the files, and the trailer that `launcher.c` reads.

The same files give the same bytes: names are sorted, and nobody's name and no time is in it.
"""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path, PurePosixPath

Files = dict[PurePosixPath, Path | bytes]  # each place in the archive, and what lies there
MAGIC = b"mlxcel\0\1"
DIGEST_LEN = 16
MEMBER_BYTES = 8 << 20  # of the archive, deflated by one thread
GZIP = 16 + zlib.MAX_WBITS


def write(output: Path, launcher: Path, files: Files, level: int) -> None:
    """Write the executable `output`, whole or not at all; `level` is zlib's, 1 to 9."""
    whole = packed(files)
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


def packed(files: Files) -> memoryview:
    """The files, and the folders that they lie in, as a tar archive in memory."""
    folders = {folder for place in files for folder in place.parents} - {PurePosixPath()}
    said = BytesIO()
    with tarfile.open(fileobj=said, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for place in sorted(folders | files.keys()):
            entry = tarfile.TarInfo(str(place))
            if place in folders:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            source = files[place]
            content = source if isinstance(source, bytes) else source.read_bytes()
            is_program = isinstance(source, Path) and source.stat().st_mode & 0o111
            entry.size, entry.mode = len(content), 0o755 if is_program else 0o644
            archive.addfile(entry, BytesIO(content))
    return said.getbuffer()


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(whole), MEMBER_BYTES):
        yield whole[begin : begin + MEMBER_BYTES]
