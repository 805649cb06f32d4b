"""The documents as a site: `python docs/build.py` writes static pages into build/site.

A reader's browser fetches the pages' own files and nothing else: the style, the search and its index lie beside
them, code is highlighted here, and a policy in each page forbids the rest. Pages work without a server as well.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

DOCS = Path(__file__).parent
THEME = DOCS / "theme"
SITE = DOCS.parent / "build" / "site"
INDEX = "search-index.js"
MOST_UNBROKEN = 24  # characters of code that fit into a line of a telephone
LIGHT, DARK = "default", "github-dark"
FOREIGN = re.compile(r"[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and the text below it until the next one."""

    level: int
    anchor: str
    heading: str
    words: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """One page. `name` is the source's path within the documents, `links` those of them that it leads to."""

    name: str
    html: str
    sections: Sequence[Section]
    links: Sequence[str]

    @property
    def title(self) -> str:
        return self.sections[0].heading

    @property
    def file(self) -> str:
        return self.name.removesuffix(".md") + ".html"


def build(site: Path = SITE) -> list[Page]:
    """Write the site, in place of what was built there before. Raises FileExistsError for a folder of others."""
    if site.exists():
        if any(site.iterdir()) and not (site / INDEX).exists():
            raise FileExistsError(f"{site} holds something that is no site")
        shutil.rmtree(site)
    pages = list(_pages())
    by_name = {page.name: page for page in pages}
    listed = [by_name[link] for link in by_name["index.md"].links if link in by_name]
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(THEME), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html")
    for page in pages:
        place = site / page.file
        place.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * page.name.count("/")
        place.write_text(template.render(page=page, pages=listed, root=root), "utf-8")
    for folder in ("images", "deploy"):
        shutil.copytree(DOCS / folder, site / folder)
    shutil.copy(THEME / "search.js", site)
    (site / "style.css").write_text((THEME / "style.css").read_text("utf-8") + _colours(), "utf-8")
    found = [
        [page.file, section.anchor, page.title, section.heading, " ".join(section.words)]
        for page in pages
        for section in page.sections
    ]
    (site / INDEX).write_text(f"globalThis.sections = {json.dumps(found, ensure_ascii=False)};\n", "utf-8")
    return pages


def _pages() -> Iterator[Page]:
    """Every document; a folder without an index gets one that lists its pages."""
    sources = {path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
    for folder in {str(PurePosixPath(name).parent) for name in sources} - {"."}:
        sources.setdefault(f"{folder}/index.md", _list_of(folder, sources))
    titles = {name: _title(text) for name, text in sources.items()}
    for name, text in sources.items():
        yield _page(name, text, titles)


def _list_of(folder: str, sources: dict[str, str]) -> str:
    lines = [f"# {folder.capitalize()}\n"]
    for name, text in sources.items():
        if name.startswith(f"{folder}/"):
            lines.append(f"- [{_title(text)}]({name.removeprefix(f'{folder}/')})")
    return "\n".join(lines) + "\n"


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def _page(name: str, text: str, titles: Mapping[str, str]) -> Page:
    markdown = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted}).enable("table")
    markdown.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    markdown.add_render_rule("code_inline", lambda _, tokens, i, *__: _code(tokens[i].content))
    tokens = markdown.parse(text)
    links: list[str] = []
    for token in tokens:
        ends = (child for child in token.children or () if child.type == "link_close")
        for link, said in pairwise(token.children or ()):
            if link.type == "link_open":
                written = str(link.attrs["href"])
                source, end = _lead(link, name), next(ends)
                if source.startswith("../"):  # a file of the project, which is not on the site
                    link.tag = end.tag = "span"
                    link.attrs = {}
                    continue
                links += filter(None, [source])
                if said.content == written:  # a file's name, which is none here
                    said.content = titles.get(source, written)
    sections = list(_sections(tokens))
    return Page(name, markdown.renderer.render(tokens, markdown.options, {}), sections, list(dict.fromkeys(links)))


def _lead(link: Token, name: str) -> str:
    """Have a link to a document lead to its page; the document's name, or nothing."""
    target, mark, anchor = str(link.attrs["href"]).partition("#")
    if FOREIGN.match(target):
        link.attrSet("rel", "noreferrer")
        return ""
    if not target:
        return ""
    folder = PurePosixPath(name).parent
    source = normpath(folder / target) + ("/index.md" if target.endswith("/") else "")
    link.attrSet("href", re.sub(r"\.md$", ".html", relpath(source, folder)) + mark + anchor)
    return source


def _sections(tokens: Sequence[Token]) -> Iterator[Section]:
    """The page's sections; headings are given anchors as GitHub gives them, and links to themselves."""
    taken: dict[str, int] = {}
    section = Section(0, "", "")
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            if section.level:
                yield section
            inline = tokens[i + 1]
            heading = _plain(inline)
            section = Section(int(token.tag[1:]), _anchor(heading, taken), heading)
            token.attrSet("id", section.anchor)
            assert inline.children is not None, "a heading has a line"
            if section.level > 1:
                inline.children.append(_mark(section.anchor))
        elif token.type == "inline" and tokens[i - 1].type != "heading_open":
            section.words.append(_plain(token))
        elif token.type in ("fence", "code_block"):
            section.words.append(" ".join(token.content.split()))
    yield section


def _plain(inline: Token) -> str:
    """A line without its marks."""
    parts = (child.content if child.type in ("text", "code_inline") else " " for child in inline.children or ()
             if child.type in ("text", "code_inline", "softbreak", "hardbreak"))  # fmt: skip
    return "".join(parts)


def _anchor(heading: str, taken: dict[str, int]) -> str:
    """As GitHub names it: in lower case, spaces as hyphens, and a number behind one that is there already."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    count = taken[anchor] = taken.get(anchor, -1) + 1
    return f"{anchor}-{count}" if count else anchor


def _mark(anchor: str) -> Token:
    """The link of a heading to itself."""
    mark = Token("html_inline", "", 0)
    mark.content = f' <a class="mark" href="#{anchor}" aria-label="link to this section">#</a>'
    return mark


def _highlighted(code: str, language: str, _: Any) -> str:
    lexer = get_lexer_by_name(language or "text")
    coloured: str = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return f'<pre class="code" tabindex="0"><code>{coloured}</code></pre>'


def _code(text: str) -> str:
    """Code within a line: short enough, it is not broken, as browsers would do at the hyphens of flags."""
    kind = ' class="short"' if len(text) <= MOST_UNBROKEN else ""
    return f"<code{kind}>{escape(text)}</code>"


def _colours() -> str:
    """The colours of code, in light and in dark."""
    light, dark = (HtmlFormatter(style=style).get_style_defs(".code") for style in (LIGHT, DARK))
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


if __name__ == "__main__":
    site = Path(sys.argv[1]) if sys.argv[1:] else SITE
    print(f"{len(build(site))} pages: {site / 'index.html'}")
