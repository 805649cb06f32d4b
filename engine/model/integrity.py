"""Whether what lies in the store is whole: every file there and as long as it was, and its content what the hub
said, where that is known. It reads and says; it mends nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.model import hub
from engine.model.memory import human_bytes
from engine.model.store import KEPT_SUFFIX, MANIFEST, STAGING_SUFFIX, Store, check_complete


@dataclass(frozen=True, slots=True)
class Checked:
    """One folder of the store. `fault` says what is wrong, or nothing; `unfinished` that it is no entry yet.

    `num_hashed` files were read and hold what the hub said they hold.
    """

    name: str
    fault: str = ""
    unfinished: bool = False
    num_hashed: int = 0


def check(store: Store, *, hashes: bool) -> Iterator[Checked]:
    """Every folder of the store, by name; with `hashes`, files whose content is known are read from end to end."""
    for folder in sorted(store.models.glob("*/*")):
        if not folder.is_dir():
            continue
        if folder.name.endswith(STAGING_SUFFIX):
            yield _unfinished(folder)
            continue
        name = f"{folder.parent.name}/{folder.name}"
        if not (folder / MANIFEST).is_file():
            yield Checked(name, "it was never completed: it has no manifest")
            continue
        try:
            check_complete(folder)
            known = hub.identities(folder) if hashes else {}
            changed = [file for file, identity in known.items() if not hub.is_what(folder / file, identity)]
        except (ModelError, OSError) as error:
            yield Checked(name, str(error))
            continue
        fault = f"{', '.join(changed)}: the content is not what the hub lists" if changed else ""
        yield Checked(name, fault, num_hashed=len(known) - len(changed))


def _unfinished(folder: Path) -> Checked:
    size = human_bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    kept = folder.name.endswith(KEPT_SUFFIX)
    short = folder.name.removeprefix(".").removesuffix(STAGING_SUFFIX).rpartition(".")[0]
    said = f"{size} of a fetch that was broken off" if kept else f"{size} of an attempt that runs or broke off"
    return Checked(f"{folder.parent.name}/{short}", said, unfinished=True)
