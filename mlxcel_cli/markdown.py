"""Markdown on a terminal while it is still being written: a block is final once the next one has begun.

Finished blocks, items of a list and lines of code are written once and never again; only the open end is redrawn.
Code stands as it is, line by line, so that it can be copied. rich renders the blocks and markdown-it finds them;
neither is known elsewhere but in `live`, which counts cells with rich.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown as rich_markdown
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from mlxcel_cli.live import COLOURS, Live

REDRAW_S = 0.05
CODE_THEME = "ansi_dark"
FENCE = Style(dim=True)
THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.block_quote": "italic",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
TRAILING_SPACES = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")
EMPTY_LINE = re.compile(r"\n[ \t]*\n\Z")
ENDED_BY_EMPTY_LINES = ("paragraph_open", "heading_open", "hr", "table_open")
LISTS = ("bullet_list_open", "ordered_list_open")


class _Code(rich_markdown.CodeBlock):
    """Code inside of other blocks: no background, and nothing around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip("\n"),
            self.lexer_name,
            theme=self.theme,
            background_color="default",
            word_wrap=True,
        )


class _Heading(rich_markdown.Heading):
    """A heading where a line begins."""

    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}


class _Blocks(rich_markdown.Markdown):
    """Blocks that are parsed already."""

    elements: ClassVar[dict[str, Any]] = {
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = tokens


@dataclass(frozen=True, slots=True)
class Block:
    """A block at the top: its tokens and its lines in the source, `end` excluded."""

    tokens: list[Token]
    start: int
    end: int

    @property
    def kind(self) -> str:
        return self.tokens[0].type


class Markdown:
    """One answer. `write` takes what goes to the terminal, `size` tells the terminal's size."""

    def __init__(self, write: Callable[[str], None], size: Callable[[], os.terminal_size]) -> None:
        self._live = Live(write, size)
        self._size = size
        self._source = ""
        self._kept_any = False
        self._num_code_lines = 0  # of the open fence, those that are kept
        self._next_number: int | None = None  # of the open list, whose first items are kept
        self._drawn_s = 0.0
        self._later: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._live.is_open

    def feed(self, text: str) -> None:
        """More of the answer. It is shown within a twentieth of a second."""
        self._source += text
        if "\n" in text:
            self._settle()
        wait_s = self._drawn_s + REDRAW_S - time.monotonic()
        if wait_s <= 0:
            self._draw()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._draw)

    def end(self) -> None:
        """All there is becomes final; an empty line sets it apart from what comes next."""
        self._stop_waiting()
        blocks = parsed(self._source)
        for block in blocks:
            self._keep(block)
        self._live.keep([""] if self._kept_any else [])
        self._source, self._kept_any = "", False

    def _settle(self) -> None:
        """Keep the blocks that another follows; of a list, the items; of code, the lines.

        Only whole lines decide: what a half line becomes is not known.
        """
        whole = self._source[: self._source.rfind("\n") + 1]
        blocks = parsed(whole)
        if not blocks:
            return
        for block in blocks[:-1]:
            self._keep(block)
        if blocks[-1].kind in ENDED_BY_EMPTY_LINES and EMPTY_LINE.search(whole):
            self._keep(blocks[-1])
            self._source = self._source[len(whole) :]
            return
        last, start = blocks[-1], blocks[-1].start
        if last.kind in LISTS and len(items := _items(last)) > 1:
            num_tokens = last.tokens.index(items[-1])
            self._keep_lines(self._lines(Block(last.tokens[:num_tokens] + last.tokens[-1:], start, start)))
            self._next_number = self._number(last) + len(items) - 1
            start = _first_line(items[-1])
        elif last.kind == "fence":
            lines = self._lines(last)
            self._keep_lines(lines)
            self._num_code_lines += len(lines)
        self._source = "\n".join(self._source.split("\n")[start:])

    def _keep(self, block: Block) -> None:
        lines = self._lines(block)
        if block.kind == "fence" and not _is_closed(block.tokens[0]):
            lines.append(_mark(block.tokens[0]))
        self._keep_lines(lines)
        self._num_code_lines, self._next_number = 0, None

    def _keep_lines(self, lines: list[str]) -> None:
        self._live.keep(self._apart(lines))
        self._kept_any = self._kept_any or bool(lines)

    def _draw(self) -> None:
        self._stop_waiting()
        self._drawn_s = time.monotonic()
        lines: list[str] = []
        for number, block in enumerate(parsed(_completed(self._source))):
            if number:
                lines += ["", *self._lines(block, is_first=False)]
            elif self._num_code_lines:
                lines += open_code_lines(block.tokens[0], self._num_code_lines)
            else:
                lines += self._apart(self._lines(block))
        self._live.draw(lines)

    def _apart(self, lines: list[str]) -> list[str]:
        """`lines` behind an empty one, where they do not go on with what is kept."""
        goes_on = not self._kept_any or self._num_code_lines or self._next_number is not None
        return lines if goes_on or not lines else ["", *lines]

    def _stop_waiting(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _lines(self, block: Block, *, is_first: bool = True) -> list[str]:
        """A block's lines; of the first one in the source, those that are not kept yet."""
        if block.kind == "fence":
            return code_lines(block.tokens[0])[self._num_code_lines if is_first else 0 :]
        if block.kind == "ordered_list_open" and is_first:
            block.tokens[0].attrs["start"] = self._number(block)
        return rendered(block.tokens, self._size().columns - 1)

    def _number(self, block: Block) -> int:
        """The number of the first item of a list."""
        return int(block.tokens[0].attrs.get("start", 1)) if self._next_number is None else self._next_number


def parsed(source: str) -> list[Block]:
    """The blocks at the top of `source`. Text that means something only as HTML, or elsewhere, stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
    blocks: list[Block] = []
    tokens: list[Token] = []
    for token in parser.parse(source):
        tokens.append(token)
        token.children = list(_plain(token.children)) if token.children else token.children
        if token.level == 0 and token.nesting <= 0:
            start, end = tokens[0].map or (0, 0)
            blocks.append(Block(tokens, start, end))
            tokens = []
    return blocks


def _plain(tokens: Sequence[Token]) -> Iterator[Token]:
    """Inline tokens with line breaks as they were written, and nothing hidden behind a link or a picture."""
    in_autolink = False
    for token in tokens:
        if token.type == "softbreak":
            yield Token("hardbreak", "br", 0)
        elif token.type == "image":
            picture = Token("text", "", 0)
            picture.content = f"![{token.content}]({token.attrs.get('src', '')})"
            yield picture
        elif token.type == "link_open" and token.markup == "autolink":
            in_autolink = True
        elif token.type == "link_close" and in_autolink:
            in_autolink = False
        else:
            yield token


def rendered(tokens: list[Token], width: int) -> list[str]:
    """The lines of blocks, without the spaces that only fill them up."""
    console = Console(
        width=max(width, 1),
        force_terminal=True,
        color_system="standard",
        theme=THEME,
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(_Blocks(tokens))
    lines = [TRAILING_SPACES.sub(r"\1", line) for line in capture.get().split("\n")]
    full = [number for number, line in enumerate(lines) if COLOURS.sub("", line)]
    return lines[full[0] : full[-1] + 1] if full else []


def code_lines(fence: Token) -> list[str]:
    """The lines of a block of code between its marks, which are dimmed; nothing is wrapped or filled up."""
    language = fence.info.partition(" ")[0] or "text"
    code = Syntax("", language, theme=CODE_THEME, tab_size=0).highlight(fence.content)
    console = Console(color_system="standard")
    lines = [_coloured(line, console) for line in code.split("\n", allow_blank=False)] if fence.content else []
    return [_mark(fence, fence.info), *lines, *([_mark(fence)] if _is_closed(fence) else [])]


def open_code_lines(fence: Token, num_kept: int) -> list[str]:
    """The lines behind the first `num_kept`, without colours: what a half line means is not known yet."""
    lines = fence.content.removesuffix("\n").split("\n")[num_kept - 1 :] if fence.content else []
    return [*lines, *([_mark(fence)] if _is_closed(fence) else [])]


def _mark(fence: Token, text: str = "") -> str:
    return FENCE.render(fence.markup + text, color_system=ColorSystem.STANDARD)


def _coloured(line: Text, console: Console) -> str:
    """A line with its colours, its tabs kept."""
    parts = ((segment.text, segment.style) for segment in line.render(console))
    return "".join(
        style.render(text, color_system=ColorSystem.STANDARD) if style and text.strip() else text
        for text, style in parts
    )


def _is_closed(fence: Token) -> bool:
    start, end = fence.map or (0, 0)
    return end - start - 1 > fence.content.count("\n") + (not fence.content.endswith("\n") and bool(fence.content))


def _items(block: Block) -> list[Token]:
    return [token for token in block.tokens if token.type == "list_item_open" and token.level == 1]


def _first_line(token: Token) -> int:
    assert token.map is not None, "blocks know their lines"
    return token.map[0]


def _completed(source: str) -> str:
    """`source` with the bold text or code that is open at its end closed, so that marks do not come and go."""
    paragraph = source[source.rfind("\n\n") + 1 :]
    if "```" in source or "~~~" in source:
        return source
    if paragraph.count("`") % 2:
        return source + "`"
    if paragraph.count("**") % 2 and not paragraph.endswith((" ", "\n")):
        return source.rstrip("*") + "**" if not source.endswith("**") else source[:-2]
    return source
