"""A measurement as one HTML file: tables and pictures, in dark and in light, with nothing fetched."""

from collections.abc import Iterator, Sequence
from html import escape

from mlxcel_cli.bench.plot import Bar, Line, bars, lines
from mlxcel_cli.bench.result import ServeResult, ServerRuns, SpeedResult, span
from mlxcel_cli.bench.summary import SHARES, Spread
from mlxcel_cli.bench.table import NAMES, rate, ratio_rows, remarks, seconds
from mlxcel_cli.render import harmless

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2128;--soft:#57606a;--line:#d0d7de;--panel:#f6f8fa;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#7d6608}
@media(prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--soft:#9da7b3;--line:#30363d;--panel:#161b22;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#ff7bb8;--c5:#d9b949}}
body{margin:0 auto;padding:1.5rem;max-width:76rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
p,li{color:var(--soft)}p{margin:.25rem 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.75rem 0}
th,td{padding:.3rem .8rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{font-weight:600}th:first-child,td:first-child{text-align:left}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1rem;margin:1rem 0}
figure{margin:0;padding:.75rem;background:var(--panel);border:1px solid var(--line);border-radius:8px}
figcaption{font-weight:600;margin-bottom:.25rem}
svg{display:block;width:100%;height:auto}svg.key{display:inline-block;width:.75rem;margin-right:.4rem}
.legend{list-style:none;margin:.25rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.25rem 1rem;font-size:.85rem}
text{fill:var(--soft);font-size:12px}.name{fill:var(--text)}.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.line{fill:none;stroke-width:2}.range{stroke-width:2;opacity:.55}
""" + "".join(
    f".line.c{n},.range.c{n}{{stroke:var(--c{n})}}.dot.c{n},.bar.c{n}{{fill:var(--c{n})}}\n" for n in range(6)
)


def speed_page(result: SpeedResult) -> str:
    """Prefill and decode of a model."""
    points = result.speed.points
    by_batch = {batch: [p for p in points if p.batch == batch] for batch in dict.fromkeys(p.batch for p in points)}
    figures = []
    for name, title in (("prefill", "Prefill"), ("decode", "Decode, all rows together")):
        drawn = []
        for batch, taken in by_batch.items():
            spans = [(p.prompt_tokens, *span(getattr(p, name))) for p in taken]
            middle = [(float(x), median) for x, median, _, _ in spans]
            drawn.append(Line(f"batch of {batch}", middle, [(low, high) for *_, low, high in spans], dots=True))
        figures.append(lines(title, "prompt tokens", "tokens/s", drawn))
    steps = [
        Line(f"{p.prompt_tokens} prompt tokens, batch of {p.batch}", list(enumerate(_in_ms(p.steps_s))))
        for p in points
        if p.batch == min(by_batch) and p.prompt_tokens in (points[0].prompt_tokens, points[-1].prompt_tokens)
    ]
    figures.append(lines("Each step of the last repeat", "step", "ms", steps))
    ranged = 3 if len(points[0].prefill) > 1 else 1
    ends = ("least", "largest")[: ranged - 1]
    rows = [("prompt tokens", "batch", "prefill tok/s", *ends, "decode tok/s", *ends, "ms/step")]
    rows += [
        (
            *(str(p.prompt_tokens), str(p.batch)),
            *(rate(value) for rates in (p.prefill, p.decode) for value in span(rates)[:ranged]),
            f"{1000 * p.batch / span(p.decode)[0]:.1f}",
        )
        for p in points
    ]
    body = result.body()
    inside = _paragraphs([*_asked(body), *result.speed.notes]) + _table(rows) + _figures(figures)
    return _page(f"Prefill and decode of {result.speed.model}", inside)


def serve_page(result: ServeResult) -> str:
    """How servers bore a load."""
    parts = [_paragraphs(_asked(result.body()))]
    if result.ratios:
        first, second = result.servers
        parts.append(f"<h2>{escape(first.url)} over {escape(second.url)}</h2>{_table(ratio_rows(result))}")
    figures = []
    for name, title in NAMES.items():
        drawn = [
            Line(server.url, [(1000 * at, place) for place, at in enumerate(spread.curve)])
            for server in result.servers
            if (spread := getattr(server.runs[-1], name)) is not None
        ]
        if drawn:
            figures.append(lines(f"Time: {title}", "ms", "% of them within", drawn))
    courses = [Line(server.url, _course(server)) for server in result.servers]
    figures.append(lines("Tokens over time", "seconds", "tokens/s", courses))
    parts.append(_figures(figures))
    for server in result.servers:
        parts.append(f"<h2>{escape(' · '.join(filter(None, (server.url, server.model))))}</h2>")
        parts.append(_table(list(_spreads(server))) + _paragraphs(remarks(server.runs)))
        parts.append(_figures([_requests(server)]))
    return _page("A server under load", "".join(parts))


def _asked(body: dict[str, object]) -> Iterator[str]:
    machine = body["machine"]
    asked = body["asked"]
    assert isinstance(machine, dict)
    assert isinstance(asked, dict)
    yield f"mlxcel {body['mlxcel']}, " + ", ".join(f"{name} {value}" for name, value in machine.items())
    given = {name.replace("_", " "): value for name, value in asked.items() if value is not None}
    yield ", ".join(f"{name} {_plain(value)}" for name, value in given.items() if value is not False)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={bound}" for name, bound in value.items() if bound is not None)
    return str(value)


def _in_ms(steps_s: Sequence[float]) -> list[float]:
    return [1000 * step_s for step_s in steps_s]


def _spreads(server: ServerRuns) -> Iterator[tuple[str, ...]]:
    yield ("seconds", *SHARES, "mean", "largest")
    for name, title in NAMES.items():
        spread: Spread | None = getattr(server.runs[-1], name)
        if spread is not None:
            yield (title, *map(seconds, (spread.p50, spread.p90, spread.p99, spread.mean, spread.largest)))


def _course(server: ServerRuns) -> list[tuple[float, float]]:
    last = server.runs[-1]
    bin_s = last.duration_s / max(len(last.tokens_over_time), 1)
    return [((place + 0.5) * bin_s, count) for place, count in enumerate(last.tokens_over_time)]


def _requests(server: ServerRuns) -> str:
    began_s = min((record.due_s for record in server.records), default=0.0)
    rows = []
    for record in sorted(server.records, key=lambda record: record.due_s):
        first_s = record.pieces_s[0] if record.pieces_s else record.ended_s
        parts = [(record.due_s - began_s, first_s - began_s, 1), (first_s - began_s, record.ended_s - began_s, 0)]
        rows.append(Bar([(record.due_s - began_s, record.ended_s - began_s, 4)] if record.error else parts))
    failed = "failed" if any(record.error for record in server.records) else ""
    return bars("Each request", "seconds", rows, ["answered", "waited for the first token", "", "", failed])


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _paragraphs(texts: Iterator[str] | Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)


def _figures(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>'


def _page(title: str, inside: str) -> str:
    return harmless(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>{inside}</main></body></html>\n"
    )
