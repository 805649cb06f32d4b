"""What has to be installed for a distribution to run: its dependencies, theirs, and their files.

It reads what is installed and installs nothing.
"""

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class NotInstalled(Exception):
    """A distribution that another one needs is not here."""


def closure(root: Distribution, extras: frozenset[str], also: tuple[str, ...] = ()) -> list[Distribution]:
    """All that `root` needs with these extras, and `also` with what that needs: `root` first, the rest by name."""
    found: dict[str, Distribution] = {}
    asked: dict[str, frozenset[str]] = {}
    waiting: list[tuple[str, frozenset[str], Distribution]] = [(_name(root), extras, root)]
    waiting += [(canonicalize_name(name), frozenset(), _installed(name, "the executable")) for name in also]
    while waiting:
        name, extras, distribution = waiting.pop()
        if name in asked and extras <= asked[name]:
            continue
        found[name], asked[name] = distribution, asked.get(name, frozenset()) | extras
        for needed in _needed(distribution, asked[name]):
            key = canonicalize_name(needed.name)
            there = found.get(key) or _installed(needed.name, name)
            waiting.append((key, frozenset(needed.extras), there))
    return [root, *(found[name] for name in sorted(found) if found[name] is not root)]


def files(distribution: Distribution) -> Iterator[tuple[Path, PurePosixPath]]:
    """Each importable file or datum: where it is, and its place below the folder that Python imports from."""
    for file in distribution.files or []:
        if file.parts[0] == ".." or "__pycache__" in file.parts or file.is_absolute():
            continue  # scripts, and what Python wrote itself
        yield Path(str(distribution.locate_file(file))), file


def _needed(distribution: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in distribution.requires or []:
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield needed


def _name(distribution: Distribution) -> str:
    return canonicalize_name(distribution.metadata["Name"])


def _installed(name: str, who: str) -> Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalled(f"{name}, which {who} needs, is not installed") from None
