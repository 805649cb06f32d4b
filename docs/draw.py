"""The figures of docs/walk.md as SVG: text stays text, no font is fetched, and colours follow the reader's scheme.

`docs/generate.py` writes them to docs/images. What they show is said in words beside them.
"""

from html import escape

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2733 }
  .small { font-size: 11.5px; fill: #55606f }
  .name { font-family: ui-monospace, monospace; font-size: 12.5px }
  .head { font-weight: 600 }
  .card { fill: #fbfcfe; stroke: #d5dbe4 }
  .lane { fill: #f0f3f8 }
  .box { fill: #ffffff; stroke: #7d8898 }
  .a { fill: #cfe3ff; stroke: #4a7fc4 }
  .b { fill: #ffe0bd; stroke: #c0842f }
  .c { fill: #cdeccf; stroke: #4d9a55 }
  .both { fill: #e3d4f7; stroke: #8a63c0 }
  .free { fill: none; stroke: #7d8898; stroke-dasharray: 3 3 }
  .line { fill: none; stroke: #55606f; stroke-width: 1.3 }
  .tip { fill: #55606f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e8ee }
    .small { fill: #aab4c2 }
    .card { fill: #161a20; stroke: #333b47 }
    .lane { fill: #1e242d }
    .box { fill: #262d38; stroke: #6d7888 }
    .a { fill: #1f3d66; stroke: #5b93dc }
    .b { fill: #5a3d14; stroke: #d1963f }
    .c { fill: #1f4a27; stroke: #5db066 }
    .both { fill: #42305f; stroke: #a482d8 }
    .free { stroke: #6d7888 }
    .line { stroke: #aab4c2 }
    .tip { fill: #aab4c2 }
  }
"""
LINE_PX = 17

Point = tuple[float, float]


class Figure:
    """One drawing, of parts that are put on it in turn. `told` is what a reader hears who cannot see it."""

    def __init__(self, width: int, height: int, title: str, told: str) -> None:
        self._size = width, height
        self._said = title, told
        self._parts: list[str] = [
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
        ]

    def svg(self) -> str:
        """The file's text."""
        width, height = self._size
        title, told = (escape(text) for text in self._said)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title told">\n'
            f'<title id="title">{title}</title>\n<desc id="told">{told}</desc>\n<style>{STYLE}</style>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )

    def text(self, x: float, y: float, said: str, kind: str = "", *, middle: bool = False) -> None:
        """`y` is where the letters stand."""
        anchor = ' text-anchor="middle"' if middle else ""
        named = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{named}{anchor}>{escape(said)}</text>')

    def box(self, x: float, y: float, width: float, name: str, *lines: str, kind: str = "box") -> float:
        """A box with a name in it and lines of text; where it ends below."""
        height = 14 + LINE_PX * (1 + len(lines))
        self.rect(x, y, width, height, kind)
        self.text(x + 10, y + 20, name, "name")
        for i, line in enumerate(lines, 1):
            self.text(x + 10, y + 20 + LINE_PX * i, line, "small")
        return y + height

    def cell(self, x: float, y: float, width: float, height: float, said: str, kind: str) -> None:
        self.rect(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + 4.5, said, "name", middle=True)

    def arrow(self, *points: Point) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="line" d="M{path}" marker-end="url(#tip)"/>')

    def line(self, *points: Point) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="line" d="M{path}"/>')


def walk() -> Figure:
    """One request's way through processes, threads and files."""
    figure = Figure(
        900, 700, "One request's walk",
        "From a client to the server, to the engine's thread, and back: files in the order of a request's way.",
    )  # fmt: skip
    lanes = ((16, "a client: mlxcel run, or any other"), (312, "the server, on asyncio"),
             (608, "the engine's thread"))  # fmt: skip
    for x, said in lanes:
        figure.rect(x, 16, 276, 668, "lane")
        figure.text(x + 138, 40, said, "head", middle=True)
    stops = (
        (0, 0, "main.py, commands/talk.py", "settings, checkpoint, the application"),
        (0, 1, "client.py, transport.py", "posts the turn: in this process or not"),
        (1, 1, "app.py, auth.py", "keys, hosts, origins"),
        (1, 2, "routes/chat.py, validate.py", "every field acts or is refused"),
        (1, 3, "generate.py", "renders, tokenizes, holds the bounds"),
        (1, 4, "bridge.py", "mails the request"),
        (2, 4, "loop.py", "takes its mail"),
        (2, 5, "scheduler.py, plan.py", "who runs, which pieces of prompts"),
        (2, 6, "engine.py, forward.py", "one forward over spans"),
        (2, 7, "sample/chain.py", "draws one token for each row"),
        (2, 8, "finish.py", "what it means, what may be shown"),
        (1, 8, "bridge.py", "a tick's events in one wake-up"),
        (1, 9, "reply.py, sse.py", "pieces of answer, then frames"),
        (0, 9, "render.py", "prints them"),
    )
    before: tuple[int, int] | None = None
    for lane, row, name, line in stops:
        x, y = 28 + 296 * lane, 56 + 63 * row
        figure.box(x, y, 252, name, line)
        if before is not None:
            figure.arrow(*_between(before, (lane, row), x, y))
        before = lane, row
    figure.arrow((872, 584), (878, 584), (878, 332), (872, 332))
    return figure


def _between(before: tuple[int, int], now: tuple[int, int], x: float, y: float) -> tuple[Point, Point]:
    """An arrow to the box of 252 by 48 at `x` and `y` from the one before: beside it, or above."""
    if now[0] == before[0]:
        return (x + 126, y - 15), (x + 126, y)
    return ((x - 44, y + 24), (x, y + 24)) if now[0] > before[0] else ((x + 296, y + 24), (x + 252, y + 24))


def tick() -> Figure:
    """What the loop does over and over."""
    figure = Figure(
        900, 316, "The tick",
        "The loop takes its mail, the scheduler returns a tick, the engine runs it, the scheduler settles the "
        "events, and they are posted; then again.",
    )  # fmt: skip
    stops = (
        ("mail", "loop.py", ("submit, cancel, stop;", "a request becomes a", "row, without arrays")),
        ("tick", "scheduler.py", ("who runs grows first,", "free slots are given;", "pieces, or a step")),
        ("run", "engine.py", ("storage, adoption, one", "forward, sampler step,", "finish step: events")),
        ("settle", "scheduler.py", ("who ended leaves, who", "is prefilled decodes,", "drafts are judged")),
        ("post", "bridge.py", ("all is counted, then", "one wake-up of", "asyncio for all events")),
    )
    for i, (verb, name, lines) in enumerate(stops):
        x = 18 + 175 * i
        figure.rect(x, 50, 164, 116, "a" if verb == "run" else "box")
        figure.text(x + 12, 74, verb, "head")
        figure.text(x + 12, 94, name, "name")
        for row, line in enumerate(lines):
            figure.text(x + 12, 116 + LINE_PX * row, line, "small")
        if i:
            figure.arrow((x - 11, 108), (x, 108))
    figure.text(18, 32, "plain values in, plain values out: only run touches arrays", "small")
    figure.arrow((800, 166), (800, 216), (100, 216), (100, 166))
    figure.rect(210, 192, 480, 106, "lane")
    figure.text(226, 216, "between post and mail", "head")
    lines = (
        "some of what the prompt cache gave is computed again (--verify-cache)",
        "where nothing else runs: the beginning of a next prompt is stored",
        "what stands now is told to /metrics; who has work or mail has the next turn",
    )
    for row, line in enumerate(lines):
        figure.text(226, 240 + 20 * row, line, "small")
    return figure


def spans() -> Figure:
    """A forward of three spans: two rows that decode, and a piece of a prompt."""
    figure = Figure(
        900, 432, "Tokens as rows",
        "Three spans of one forward, of 1, 1 and 4 tokens. Products take all six tokens as rows of one matrix, "
        "attention takes each span over its own row's keys, and the head runs on the three tokens whose logits "
        "are wanted.",
    )  # fmt: skip
    tokens = (("A", 40, "a"), ("B", 17, "b"), ("C", 16, "c"), ("C", 17, "c"), ("C", 18, "c"), ("C", 19, "c"))
    heads = (
        (30, "a span: a row's next tokens"),
        (254, "row, position"),
        (358, "in each layer: products, then attention"),
        (756, "head"),
    )
    for x, said in heads:
        figure.text(x, 36, said, "head")
    said = (
        (0, 1, "a", ("A decodes", "its last token")),
        (1, 1, "b", ("B decodes", "its last token")),
        (2, 4, "c", ("C has the last piece", "of its prompt;", "16 tokens are stored", "or adopted")),
    )
    for first, count, kind, lines in said:
        y = 60 + 52 * first
        figure.rect(30, y, 190, 52 * count - 12, kind)
        for row, line in enumerate(lines):
            figure.text(42, y + 18 + LINE_PX * row, line, "small")
        figure.arrow((220, y + 20), (254, y + 20))
    for i, (row, position, kind) in enumerate(tokens):
        y = 60 + 52 * i
        figure.cell(254, y, 88, 40, f"{row}, {position}", kind)
        figure.line((342, y + 20), (358, y + 20))
        if i in (0, 1, 5):
            figure.arrow((724, y + 20), (756, y + 20))
            figure.cell(756, y, 116, 40, f"logits of {row}", kind)
    figure.rect(358, 60, 86, 300, "lane")
    for i, line in enumerate(("products,", "norms:", "six rows of", "one matrix")):
        figure.text(401, 190 + 20 * i, line, "small", middle=True)
    for first, count, kind, keys in ((0, 1, "a", 41), (1, 1, "b", 18), (2, 4, "c", 20)):
        y, height = 60 + 52 * first, 52 * count - 12
        figure.arrow((444, y + height / 2), (480, y + height / 2))
        figure.rect(480, y, 244, height, kind)
        figure.text(492, y + height / 2 - 2, f"over the {keys} keys of its row", "small")
        more = "each query sees those up to its own" if count > 1 else "the new one among them"
        figure.text(492, y + height / 2 + 14, more, "small")
    figure.text(
        30,
        392,
        "No row is padded, and no mask joins two of them.",
    )
    figure.text(
        30,
        414,
        "ids [6, 1], positions [6]. A row with k drafts has 1 + k tokens here, and logits are wanted behind each.",
        "small",
    )
    return figure


def blocks() -> Figure:
    """Two rows and the prefix tree over the blocks of a pool."""
    figure = Figure(
        900, 440, "Blocks and the prefix tree",
        "A pool of ten blocks. Rows A and B share blocks 0 and 1, each has others of its own, and the tree of the "
        "prompt cache names the very blocks that are full.",
    )  # fmt: skip
    kinds = ("both", "both", "a", "b", "b", "a", "free", "free", "box", "free")
    held = (3, 3, 2, 2, 1, 1, 0, 0, 1, 0)
    figure.text(28, 36, "a pool of each layer: blocks of 16 tokens, and how many hold each", "head")
    for block, (kind, count) in enumerate(zip(kinds, held, strict=True)):
        x = 28 + 85 * block
        figure.cell(x, 52, 79, 46, str(block), kind)
        figure.text(
            x + 39, 116, f"{count} hold{'' if count > 1 else 's'} it" if count else "free", "small", middle=True
        )
    figure.text(28, 160, "rows: tables of block numbers", "head")
    for y, row, table, kind, last in ((176, "A", (0, 1, 2, 5), "a", 5), (236, "B", (0, 1, 3, 4), "b", 4)):
        figure.text(28, y + 28, row, "name")
        for i, block in enumerate(table):
            own = "both" if block < 2 else kind
            figure.cell(52 + 76 * i, y, 70, 42, str(block), own)
        figure.text(366, y + 18, f"{last} is not full yet:", "small")
        figure.text(366, y + 34, "its row alone writes", "small")
    figure.text(540, 160, "the prefix tree: full blocks, by their tokens", "head")
    for x, y, said, kind in ((540, 212, "root", "lane"), (622, 212, "0", "both"), (704, 212, "1", "both"),
                             (796, 182, "2", "a"), (796, 242, "3", "b"), (622, 272, "8", "box")):  # fmt: skip
        figure.cell(x, y, 62, 42, said, kind)
    figure.arrow((602, 233), (622, 233))
    figure.arrow((684, 233), (704, 233))
    figure.arrow((766, 233), (781, 233), (781, 203), (796, 203))
    figure.arrow((766, 233), (781, 233), (781, 263), (796, 263))
    figure.arrow((571, 254), (571, 293), (622, 293))
    lines = (
        "To keep a block and to adopt it is to count: nothing is copied. C, which begins like A, names 0 to 2.",
        "Of a block that C shares in part, 8 tokens or more, it has a copy before it writes there.",
        "Block 8 is held by the tree alone: such go first when somebody needs room. What a live row names stays.",
        "At one slot, without the compiled kernels, or where a state cannot be cut, rows have their own buffers.",
    )
    for i, line in enumerate(lines):
        figure.text(28, 346 + 22 * i, line, "small")
    return figure


def figures() -> dict[str, str]:
    """Every figure by the name of its file."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in (walk, tick, spans, blocks)}
