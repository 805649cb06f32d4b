"""The port that `serve` would take, the proxies, and the model hub."""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import words_of
from mlxcel_cli import config, render
from mlxcel_cli.address import shown
from mlxcel_cli.doctor.finding import Finding, State

PATIENCE_S = 3.0
PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")
PROXY_HINT = "write http://HOST:PORT, with NAME:PASSWORD@ before the host where it asks for them"
LOCAL = ("localhost", "127.0.0.1")


def look_at_port(settings: config.Settings) -> Iterator[Finding]:
    """Whether `serve` could listen where the settings say."""
    host, port = settings.listens_at
    if host.endswith(".sock"):
        yield _socket(Path(host))
        return
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except UnicodeError:  # of IDNA: an empty label, or one of more than 63 letters
        yield Finding("port", State.BROKEN, f"{host} is no name of a host", "--host says where to listen")
        return
    except OSError as error:
        if said := _who(settings.address):
            yield Finding("port", State.NOTE, f"{said} is served at {host}:{port}", "--port 0 takes any free one")
        else:
            why = error.strerror or str(error)
            hint = "--port 0 takes any free one; --host says where to listen"
            yield Finding("port", State.BROKEN, f"{host}:{port} cannot be taken: {why}", hint)
        return
    yield Finding("port", State.OK, f"{host}:{port} is free")


def look_at_proxies(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Which proxies are set, and whether clients would ask them for this machine."""
    found, without = config.proxies() if environment is None else config.proxies(environment)
    if not found:
        yield Finding("proxy", State.OK, "none is set")
        return
    known = {name: url for name, url in found.items() if _is_url(url)}
    for name in sorted(found.keys() - known.keys()):  # not shown: where a password begins in it cannot be known
        yield Finding("proxy", State.BROKEN, f"{name} is not the URL of a proxy", PROXY_HINT)
    if not known:
        return
    said = ", ".join(f"{name}={shown(url)}" for name, url in known.items())
    spared = {host.strip().lower() for host in without.split(",")}
    if "*" in spared or all(host in spared for host in LOCAL):
        yield Finding("proxy", State.OK, said)
    else:
        hint = f"NO_PROXY={','.join(LOCAL)} lets clients reach a server on this machine"
        yield Finding("proxy", State.WARNING, f"{said}; not excepted: this machine", hint)


def look_at_hub() -> Iterator[Finding]:
    """Whether the model hub answers soon."""
    import httpx2
    from huggingface_hub import constants

    here = "models that are here load all the same"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", State.NOTE, "HF_HUB_OFFLINE keeps from it", here)
        return
    if not all(_is_url(url) for url in config.proxies()[0].values()):
        yield Finding("hub", State.WARNING, "it is not asked: the URL of a proxy is none", here)
        return
    try:
        answer = httpx2.get(f"{constants.ENDPOINT}/api/models?limit=1", timeout=PATIENCE_S, follow_redirects=True)
        fault = f"it answered {answer.status_code}" if answer.status_code >= 400 else ""
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        fault = words_of(error)
    if fault:
        hint = f"{here}; to fetch others, name a mirror with HF_ENDPOINT, or a proxy with HTTPS_PROXY"
        yield Finding("hub", State.WARNING, f"{shown(constants.ENDPOINT)}: {shown(fault)}", hint)
    else:
        yield Finding("hub", State.OK, f"{shown(constants.ENDPOINT)} answers")


def _socket(path: Path) -> Finding:
    """Whether a socket could be made at `path`."""
    why = ""
    if not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"{path.parent} cannot be written"
    elif path.exists() and not path.is_socket():
        why = "it exists and is not a socket"
    else:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    return Finding("port", State.NOTE, f"a server answers at {path}", "--host names another one")
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        return Finding("port", State.BROKEN, f"{path} cannot be made: {why}", "--host names another one")
    return Finding("port", State.OK, f"{path}: a socket, made when the server starts")


def _who(address: str) -> str:
    """The model that an OpenAI-compatible server there lists, or nothing."""
    import httpx2

    try:
        listing = httpx2.get(f"{address}/v1/models", timeout=PATIENCE_S, trust_env=False).json()
        return render.harmless(str(listing["data"][0]["id"]))
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _is_url(proxy: str) -> bool:
    """Whether clients can read the value of a proxy variable; without a scheme it is http's."""
    try:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        whole = bool(url.hostname) and url.port != 0 and "@" not in url.path + url.query + url.fragment
        return whole and url.scheme in PROXY_SCHEMES
    except ValueError:
        return False
