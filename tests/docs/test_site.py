"""The site is built of all documents, fetches nothing from elsewhere, and no link of it leads nowhere."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.build import DOCS, INDEX, build

# What a browser fetches by itself, of each tag.
FETCHED = {
    "audio": ("src",), "embed": ("src",), "iframe": ("src", "srcdoc"), "image": ("href", "xlink:href"),
    "img": ("src", "srcset"), "input": ("src",), "link": ("href",), "object": ("data",), "script": ("src",),
    "source": ("src", "srcset"), "track": ("src",), "use": ("href", "xlink:href"), "video": ("src", "poster"),
}  # fmt: skip


@dataclass
class Written(HTMLParser):
    """A page as it was written: what it fetches, where it leads, and what can be led to."""

    text: str
    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += given
        self.fetched += [given[name] for name in FETCHED.get(tag, ()) if name in given]
        self.links += [given["href"]] if tag == "a" else []
        self.ids += [given["id"]] if "id" in given else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Written]:
    return {path: Written(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def led_to(page: Path, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link of the page leads to."""
    parts = urlsplit(link)
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, unquote(parts.fragment)


def test_every_document_is_a_page(site: Path) -> None:
    for document in DOCS.rglob("*.md"):
        assert (site / document.relative_to(DOCS)).with_suffix(".html").is_file(), document


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Written]) -> None:
    for page, written in pages.items():
        assert written.fetched, page
        for address in written.fetched:
            if address != "data:,":  # the icon: none
                assert not urlsplit(address).scheme, f"{page.name}: {address}"
                assert not urlsplit(address).netloc, f"{page.name}: {address}"
                assert led_to(page, address)[0].is_file(), f"{page.name}: {address}"
        assert not {"style", "onload", "onclick", "onerror", "ping"} & set(written.attributes)
        assert "<style" not in written.text
        assert "default-src 'none'" in written.text


def test_style_script_and_figures_name_no_address(site: Path) -> None:
    files = [site / "style.css", site / "search.js", *site.rglob("*.svg")]
    assert len(files) > 2
    for file in files:
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?i)https?:|//[a-z]|@import|url\((?!#)", re.sub(r"// .*", "", text)), file.name


def test_every_link_leads_somewhere(pages: dict[Path, Written]) -> None:
    for page, written in pages.items():
        for link in written.links:
            if not urlsplit(link).scheme:
                target, anchor = led_to(page, link)
                assert target.is_file(), f"{page.name}: {link}"
                assert not anchor or anchor in pages[target].ids, f"{page.name}: {link}"


def test_what_leads_out_of_the_documents_leads_to_a_file() -> None:
    for document in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\((\.\./[^)#]+)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_anchor_is_there_twice(pages: dict[Path, Written]) -> None:
    for page, written in pages.items():
        assert len(written.ids) == len(set(written.ids)), page.name


def test_every_page_is_reached_from_the_first(site: Path, pages: dict[Path, Written]) -> None:
    reached, new = set(), [site / "index.html"]
    while new:
        page = new.pop()
        if page not in reached:
            reached.add(page)
            led = [led_to(page, link)[0] for link in pages[page].links if not urlsplit(link).scheme]
            new += [target for target in led if target in pages]
    assert [page.name for page in pages if page not in reached] == []


def test_the_search_knows_every_page_and_leads_to_what_is_there(site: Path, pages: dict[Path, Written]) -> None:
    text = (site / INDEX).read_text("utf-8").removeprefix("globalThis.sections = ").removesuffix(";\n")
    sections = json.loads(text)
    assert {site / file for file, *_ in sections} == set(pages)
    for file, anchor, title, heading, _ in sections:
        assert anchor in pages[site / file].ids, f"{file}: {heading}"
        assert title
        assert heading


def test_code_is_coloured_when_the_site_is_built(site: Path) -> None:
    text = (site / "tutorial.html").read_text("utf-8")
    assert re.search(r'<pre class="code"[^>]*><code><span class="gp">', text)
    style = (site / "style.css").read_text("utf-8")
    assert style.count(".code .gp") == 2, "once in light and once in dark"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        build(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_the_readme_leads_to_what_is_there() -> None:
    readme = DOCS.parent / "README.md"
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", readme.read_text("utf-8"))
    assert targets
    assert [target for target in targets if not (readme.parent / target).exists()] == []
