"""A model hub on this machine: what the library asks of one, over HTTP, and what can go wrong there."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}
NO_REPOSITORY = {"X-Error-Code": "RepoNotFound"}
NO_REVISION = {"X-Error-Code": "RevisionNotFound"}
LARGE = ".safetensors"


@dataclass
class Hub:
    """Repositories by name, each a list of commits, the last one `main`; a commit is its files by name.

    Files named `*.safetensors` are large ones: known by their sha256 and served from another place. `refuse` maps
    a repository to a status and headers; `cut` maps a file to the bytes after which its connection breaks, once.
    """

    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    refuse: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    served_as: dict[str, bytes] = field(default_factory=dict)
    ignores_range: bool = False
    says_instead: bytes | None = None
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    url: str = ""

    def gets(self, name: str) -> list[str | None]:
        """The Range header of each request for the content of the file `name`."""
        return [
            ranges
            for method, path, ranges, _ in self.asked
            if method == "GET" and path.endswith(f"/{name}") and ("/large/" in path or LARGE not in path)
        ]


def commit_of(repository: str, number: int) -> str:
    return hashlib.sha1(f"{repository} {number}".encode()).hexdigest()


def _listed(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if name.endswith(LARGE):
        oid = hashlib.sha256(content).hexdigest()
        entry |= {"oid": "0" * 40, "lfs": {"oid": oid, "size": len(content), "pointerSize": 134}}
    return entry


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve `hub` until the block ends; yields and sets its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            token = self.headers.get("Authorization")
            hub.asked.append((self.command, self.path.partition("?")[0], self.headers.get("Range"), token))
            parts = self.path.partition("?")[0].strip("/").split("/")
            repository = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
            if hub.says_instead is not None:
                self.answer(200, hub.says_instead)
            elif parts[0] == "large":
                self.content("/".join(parts[1:3]), parts[3], "/".join(parts[4:]))
            elif repository in hub.refuse:
                status, headers = hub.refuse[repository]
                self.answer(status, b"{}", headers)
            elif repository not in hub.repositories:
                self.answer(404, b"{}", NO_REPOSITORY)
            elif parts[0] == "api":
                self.api(repository, parts[4] if len(parts) > 4 else "", parts[5] if len(parts) > 5 else "main")
            elif parts[-1].endswith(LARGE):
                commit, name = self.commit(repository, parts[3]), "/".join(parts[4:])
                self.answer(302, b"", {"Location": f"{hub.url}/large/{repository}/{commit}/{name}"})
            else:
                self.content(repository, parts[3], "/".join(parts[4:]))

        def commit(self, repository: str, revision: str) -> str | None:
            commits = [commit_of(repository, number) for number in range(len(hub.repositories[repository]))]
            known = {"main": commits[-1], **{f"v{i}": name for i, name in enumerate(commits)}}
            return known.get(revision, revision if revision in commits else None)

        def api(self, repository: str, what: str, revision: str) -> None:
            commit = self.commit(repository, revision)
            if commit is None:
                self.answer(404, b"{}", NO_REVISION)
            elif what == "tree":
                files = self.files(repository, commit)
                folder = {"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}
                listed = [folder, *(_listed(name, content) for name, content in files.items())]
                self.answer(200, json.dumps(listed).encode())
            else:
                self.answer(200, json.dumps({"id": repository, "sha": commit, "siblings": []}).encode())

        def files(self, repository: str, commit: str) -> dict[str, bytes]:
            commits = hub.repositories[repository]
            return next(files for i, files in enumerate(commits) if commit_of(repository, i) == commit)

        def content(self, repository: str, commit: str, name: str) -> None:
            body = hub.served_as.get(name, self.files(repository, commit)[name])
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = 0 if asked is None or hub.ignores_range else int(asked[1])
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.answer(206 if start else 200, body[start:], headers, cut=hub.cut.pop(name, None))

        def answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub.url
        finally:
            server.shutdown()
            thread.join()


def point_the_library_at(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Let the library in this process ask `hub` and read `cache`: it has read its environment already."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = "/" + constants.HUGGINGFACE_CO_URL_TEMPLATE.split("/", 3)[3]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def environment_of(hub: Hub, cache: str) -> dict[str, str]:
    """The same for another process."""
    return {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
