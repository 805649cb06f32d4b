"""The built-in page: its files, what the browser is told to hold them to, and who may have them."""

import re
from pathlib import Path

import pytest

from server import page
from server.page import FILES, POLICY
from tests.serving import served

pytestmark = pytest.mark.anyio

WEB = Path(page.__file__).with_name("web")
MOST_BYTES = 100_000
TEXTS = {name: (WEB / name).read_text() for name in FILES.values()}


def test_every_file_is_served_and_they_are_small() -> None:
    assert sorted(FILES.values()) == sorted(path.name for path in WEB.iterdir())
    assert sum(len(text.encode()) for text in TEXTS.values()) < MOST_BYTES


@pytest.mark.parametrize("path", FILES)
async def test_each_file_comes_with_what_holds_it(tiny: Path, path: str) -> None:
    async with served(tiny) as service:
        response = await service.client.get(path)
        assert response.status_code == 200
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert response.headers["content-type"] == f"{kind[FILES[path].rpartition('.')[2]]}; charset=utf-8"
        assert response.content == (WEB / FILES[path]).read_bytes()
        expected = {
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "x-frame-options": "DENY",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }
        assert {name: response.headers.get(name) for name in expected} == expected
        etag = response.headers["etag"]
        for held in (etag, f'"another" ,W/{etag}', "*"):
            again = await service.client.get(path, headers={"if-none-match": held})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["content-security-policy"] == POLICY
        changed = await service.client.get(path, headers={"if-none-match": '"another"'})
        assert changed.status_code == 200
        assert (await service.client.post(path)).status_code == 405


def test_the_policy_lets_nothing_run_that_is_not_a_file_of_the_page() -> None:
    said = dict(directive.split(" ", 1) for directive in POLICY.split("; "))
    assert said["default-src"] == said["base-uri"] == said["form-action"] == said["frame-ancestors"] == "'none'"
    sources = {name: value for name, value in said.items() if name.endswith("-src") and name != "default-src"}
    assert set(sources.values()) == {"'self'"}
    assert said["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in POLICY


def test_the_page_asks_nobody_else_and_has_no_script_or_style_in_its_text() -> None:
    html = TEXTS["index.html"]
    assert set(re.findall(r'(?:src|href)="([^"]+)"', html)) <= {*FILES, "#chat", "#engine", "#chat-view"}
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", html) == []
    assert re.findall(r"url\(|@import", TEXTS["app.css"]) == []
    for name, text in TEXTS.items():
        hosts = set(re.findall(r"https?://[\w.-]+", text))
        assert hosts <= {"http://www.w3.org"}, name


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".js")])
def test_no_text_becomes_markup(name: str) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    assert re.findall(ways, TEXTS[name]) == []
    imported = re.findall(r'from "\./([\w.]+)"', TEXTS[name])
    assert set(imported) <= set(TEXTS)


async def test_no_web_removes_it(tiny: Path) -> None:
    async with served(tiny, server={"no_web": True}) as service:
        for path in FILES:
            response = await service.client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert (await service.client.get("/health")).status_code == 200


async def test_it_needs_no_key_and_is_for_no_foreign_host(tiny: Path) -> None:
    async with served(tiny, server={"api_key": ("sk-one",)}) as service:
        for path in FILES:
            assert (await service.client.get(path)).status_code == 200
            assert (await service.client.get(path, headers={"host": "evil.test"})).status_code == 403
        assert (await service.client.get("/web/")).status_code == 401
        assert (await service.client.get("/web/../config.py")).status_code == 401
