"""A file that is replaced whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def draft_of(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path`, its owner's alone: it takes its place when the block ends well, and goes otherwise."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".draft")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
