"""Checkpoints on the Hugging Face hub: what a name means there, which files it needs, and how they get here.

One commit is settled on first and everything comes from it. Each file is identified by what the hub says it holds
(the sha256 of a large one, git's digest of a small one, both also its ETag), is written under that identity,
continued by Range where an earlier attempt stopped, and takes its name only when its content is what was said.
The Hugging Face cache is read and never written, and no code is fetched. It knows folders and files; the store
decides what is whole.
"""

import fnmatch
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import FetchFailed, ModelError, ModelNotFound, UnsupportedModel, words_of
from engine.model.memory import human_bytes
from engine.model.store import INDEX, TOKENIZER_FILES, check_complete, read_json

Progress = Callable[[str, int, int | None], None]

BARE_OWNER = "mlx-community"
PARTS_FOLDER = ".fetch"
IDENTITIES = ".identities.json"
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
TOKENIZERS = (*TOKENIZER_FILES, "*.tiktoken")
WEIGHTS = "model*.safetensors"
MODULES = "modules.json"
PIECE_BYTES = 1 << 20
ENDPOINT_HINT = (
    "name a mirror with HF_ENDPOINT, or a proxy with HTTPS_PROXY; what has come is kept for the next attempt"
)

_NAME = re.compile(
    r"(?:(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]*)/)?(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9._/-]*))?"
)
_OF_MODULE = re.compile(r"[0-9]+_[A-Za-z0-9]+/(config\.json|model\.safetensors)")


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the hub, and the branch, tag or commit asked for, if any."""

    repository: str
    revision: str | None = None

    @property
    def entry(self) -> str:
        """What the store calls it."""
        return f"{self.repository}@{self.revision.replace('/', '-')}" if self.revision else self.repository


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit. `identity` is the sha256 of its content, or 40 digits of git's own digest of it."""

    name: str
    size_bytes: int
    identity: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a repository: the files at its top, and those of its modules' folders, by name."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]

    @property
    def source(self) -> str:
        """Where it comes from, as `list` shows it."""
        return f"{self.name.repository} {self.commit[:12]}"


def hub_name(reference: str) -> HubName | None:
    """What `reference` (`name`, `owner/name`, either with `@revision`) means on the hub; None where it cannot."""
    found = _NAME.fullmatch(reference)
    if found is None or reference.endswith(".gguf"):
        return None
    owner = found["owner"] or BARE_OWNER
    return HubName(f"{owner}/{found['name']}", found["revision"])


def cached(name: HubName) -> Path | None:
    """The snapshot in the Hugging Face cache, when it is whole; it is used where it lies."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError

    try:
        found = try_to_load_from_cache(name.repository, "config.json", revision=name.revision)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
        check_complete(folder)
        listed = get_cached_repo_tree(name.repository, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        return folder
    except (HFValidationError, ModelError, OSError):
        return None
    needed = [file for file in listed if _any(file.path, ("*.json", "*.jinja", WEIGHTS))]
    return folder if all(_size_bytes(folder / file.path) == file.size for file in needed) else None


def resolve(name: HubName) -> Snapshot:
    """Settle on one commit of `name` and list its files.

    Raises ModelNotFound when there is no such repository or revision, UnsupportedModel when it is no checkpoint
    that mlx-lm reads, FetchFailed when the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    with _plain_errors(name):
        api = HfApi()
        info = api.model_info(name.repository, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if info.sha is None:
            raise FetchFailed(f"the hub names no commit of {name.entry}")
        tree = list(api.list_repo_tree(name.repository, revision=info.sha))
        if any(file.path == MODULES for file in tree):
            tree = list(api.list_repo_tree(name.repository, revision=info.sha, recursive=True))
    files = {
        file.path: HubFile(file.path, file.size, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in tree
        if isinstance(file, RepoFile)
        and (_any(file.path, (*SMALL_FILES, "*.safetensors")) or _OF_MODULE.fullmatch(file.path))
    }
    has_weights = INDEX in files or fnmatch.filter(files, WEIGHTS)
    if "config.json" not in files or not has_weights or not any(_any(file, TOKENIZERS) for file in files):
        holds_gguf = any(file.path.endswith(".gguf") for file in tree)
        raise UnsupportedModel(
            f"{name.repository} on the hub is no checkpoint with configuration, tokenizer and safetensors weights",
            hint="it holds GGUF files: download one and name the file" if holds_gguf else "",
        )
    return Snapshot(name, info.sha, files)


def fetch(snapshot: Snapshot, folder: Path, progress: Progress) -> None:
    """Bring the checkpoint into `folder`, going on from whatever an earlier attempt left there.

    Raises FetchFailed, and OSError when the disk does not take it; the folder keeps what has come until then.
    """
    parts = folder / PARTS_FOLDER
    parts.mkdir(exist_ok=True)
    small = [
        file for name, file in snapshot.files.items() if _any(name, SMALL_FILES) or _OF_MODULE.fullmatch(name)
    ]
    weights = [snapshot.files[name] for name in fnmatch.filter(snapshot.files, WEIGHTS)]
    if INDEX in snapshot.files:
        _bring(snapshot, [snapshot.files[INDEX]], folder, silent)
        weights = _indexed(snapshot, folder)
    _forget_others(folder, parts, [*small, *weights])
    _bring(snapshot, [*small, *weights], folder, progress)
    for path in (*parts.iterdir(), parts):
        path.rmdir() if path.is_dir() else path.unlink()
    said = {file.name: file.identity for file in (*small, *weights)}
    (folder / IDENTITIES).write_text(json.dumps(said, indent=1), encoding="utf-8")


def identities(folder: Path) -> dict[str, str]:
    """What the hub said each file of a fetched checkpoint holds; nothing where that was not kept."""
    if not (folder / IDENTITIES).is_file():
        return {}
    return {name: str(identity) for name, identity in read_json(folder / IDENTITIES).items()}


def is_what(path: Path, identity: str) -> bool:
    """Whether `path` holds what `identity` says. Raises OSError."""
    return _holds(path, HubFile(path.name, path.stat().st_size, identity))


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether `name` is a file at the top of its repository that fits one of `patterns`."""
    plain = not name.startswith(".") and not {"/", "\\", "\0"} & set(name)
    return plain and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _size_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _indexed(snapshot: Snapshot, folder: Path) -> list[HubFile]:
    """The weights files that the index names. Raises ModelError for one that the commit does not hold."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    for name in names:
        if name not in snapshot.files:
            raise ModelError(f"{snapshot.name.repository} on the hub is not whole: {name} of its index is missing")
    return [snapshot.files[name] for name in names]


def _part_name(file: HubFile) -> str:
    return f"{file.name.replace('/', '--')}.{file.identity}"


def _forget_others(folder: Path, parts: Path, files: list[HubFile]) -> None:
    """Delete what an attempt at another commit left: files of other names, parts of other content."""
    named, identified = {file.name for file in files}, {_part_name(file) for file in files}
    for path in list(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if path.is_file() and (path.name not in identified if path.parent == parts else inside not in named):
            path.unlink()


def _bring(snapshot: Snapshot, files: list[HubFile], folder: Path, progress: Progress) -> None:
    """Bring each of `files` whole into `folder`, unless it is there."""
    _check_space(files, folder)
    total = sum(file.size_bytes for file in files)
    before, stage = 0, "fetch"
    for file in files:
        target = folder / file.name
        if not _holds(target, file):
            target.unlink(missing_ok=True)
            part = folder / PARTS_FOLDER / _part_name(file)
            _continue(snapshot, file, part, _beyond(progress, stage, before, total))
            if not _holds(part, file):
                part.unlink()
                raise FetchFailed(f"{file.name} of {snapshot.name.entry} came with content the hub does not list")
            target.parent.mkdir(exist_ok=True)
            os.replace(part, target)
        before += file.size_bytes
        progress(stage, before, total)


def _check_space(files: list[HubFile], folder: Path) -> None:
    """Refuse what the disk cannot take before it is tried. Raises ModelError."""
    here = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    missing_bytes = sum(file.size_bytes for file in files) - here
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes > free_bytes:
        said = f"{human_bytes(missing_bytes)} are still to come and {human_bytes(free_bytes)} of the disk are free"
        raise ModelError(f"the model does not fit: {said}", hint="MLXCEL_HOME names another place for the store")


def _beyond(progress: Progress, stage: str, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(stage, before + done, total)


def _holds(path: Path, file: HubFile) -> bool:
    """Whether `path` has the content of `file`."""
    if _size_bytes(path) != file.size_bytes:
        return False
    if len(file.identity) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    with open(path, "rb") as content:
        while piece := content.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest() == file.identity


class _Counted(io.BufferedWriter):
    """A file that tells how long it has become."""

    def __init__(self, path: Path, told: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._told = told

    def write(self, content: bytes) -> int:  # type: ignore[override]
        written = super().write(content)
        self.flush()
        self._told(self.tell())
        return written


def _continue(snapshot: Snapshot, file: HubFile, part: Path, told: Callable[[int], None]) -> None:
    """Fetch what `part` still lacks of `file`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import silent_tqdm

    have = _size_bytes(part) or 0
    if have > file.size_bytes:
        part.unlink()
        have = 0
    url = hf_hub_url(snapshot.name.repository, file.name, revision=snapshot.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with _plain_errors(snapshot.name), _quiet_library(), _Counted(part, told) as out:
        http_get(
            url, out, resume_size=have, headers=headers, expected_size=file.size_bytes, tqdm_class=silent_tqdm
        )


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Keep the library from writing a warning of several lines for each of its own attempts."""
    logger = logging.getLogger("huggingface_hub.file_download")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _plain_errors(name: HubName) -> Iterator[None]:
    """Turn what the library raises into our types, one line each."""
    import httpx2
    from huggingface_hub import constants, errors

    token_hint = "HF_TOKEN holds the token of an account that may read it"
    try:
        yield
    except errors.GatedRepoError as error:
        terms = f"accept its terms at {constants.ENDPOINT}/{name.repository}"
        raise FetchFailed(f"{name.repository} is gated on the hub", hint=f"{terms}; {token_hint}") from error
    except errors.RepositoryNotFoundError as error:
        said = f"the hub has no {name.repository} that may be read from here"
        raise ModelNotFound(said, hint=f"for a private one, {token_hint}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{name.repository} on the hub has no revision {name.revision!r}") from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{name.repository} cannot be a name on the hub") from error
    except errors.OfflineModeIsEnabled as error:
        raise ModelNotFound(
            f"{name.entry} is not on this machine, and HF_HUB_OFFLINE keeps it off the hub"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = token_hint if status in (401, 403) else "what has come is kept: the next attempt goes on from there"
        raise FetchFailed(f"the hub answered {status} when asked for {name.entry}", hint=hint) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        said = words_of(error)
        raise FetchFailed(f"the hub cannot be reached for {name.entry}: {said}", hint=ENDPOINT_HINT) from error
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # What answers at HF_ENDPOINT may be no hub at all, and the library trusts it.
        said = words_of(error)
        raise FetchFailed(
            f"the hub's answer about {name.entry} cannot be used: {said}", hint=ENDPOINT_HINT
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise
        # The library's own word for a body of another length than was listed.
        raise FetchFailed(f"a file of {name.entry} came with another length than the hub lists") from error
