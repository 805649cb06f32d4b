"""A measurement as tables on the terminal, with the course of things as sparklines."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_cli import config, render
from mlxcel_cli.bench.result import ServeResult, ServerRuns, SpeedResult, span, steps_per_s
from mlxcel_cli.bench.sparkline import distribution, sparkline
from mlxcel_cli.bench.summary import Spread, Summary

if TYPE_CHECKING:
    from rich.table import Table

PIPE_COLUMNS = 160
LATE_S = 0.05
NAMES = {"ttft_s": "first token", "itl_s": "between tokens", "e2e_s": "whole answer"}


def show_speed(result: SpeedResult) -> None:
    """One line a size."""
    table = _table("prompt", "batch", "prefill tok/s", "", "decode tok/s", "", "ms/step", "steps", text=(3, 5, 7))
    for point in result.speed.points:
        table.add_row(
            *(str(point.prompt_tokens), str(point.batch)),
            *(_median(point.prefill), _ends(point.prefill), _median(point.decode), _ends(point.decode)),
            *(f"{1000 * point.batch / span(point.decode)[0]:.1f}", sparkline(steps_per_s(point))),
        )
    _print(table)
    _say(*result.speed.notes[:3])


def show_serve(result: ServeResult) -> None:
    """A table for each server, and one of the ratios where there are two."""
    for place, server in enumerate(result.servers):
        _say(*[""] * (place > 0), f"{server.url}  {server.model}")
        _print(_of_server(server))
        _say(*remarks(server.runs))
    if result.ratios:
        first, second = result.servers
        _say("", f"{first.url} over {second.url}")
        head, *rows = ratio_rows(result)
        table = _table(*head)
        for row in rows:
            table.add_row(*row)
        _print(table)


def ratio_rows(result: ServeResult) -> list[tuple[str, ...]]:
    """Heading and rows of the first server's figures over the second's, with ranges where runs are several."""
    num_columns = 4 if len(result.servers[0].runs) > 1 else 2
    rows = [("figure", "ratio", "least", "largest")]
    rows += [(said(name), *(f"{ratio:.2f}" for ratio in found)) for name, found in result.ratios.items()]
    return [row[:num_columns] for row in rows]


def _of_server(server: ServerRuns) -> "Table":
    last = server.runs[-1]
    table = _table("seconds", "p50", "p90", "p99", "mean", "largest", "distribution from 0", text=(6,))
    for name, title in NAMES.items():
        spread: Spread | None = getattr(last, name)
        if spread is not None:
            values = (spread.p50, spread.p90, spread.p99, spread.mean, spread.largest)
            table.add_row(title, *map(seconds, values), distribution(spread.curve))
    return table


def remarks(runs: Sequence[Summary]) -> Iterator[str]:
    """What is said of the last run beside its percentiles, and of all where there are several."""
    last = runs[-1]
    yield f"{rate(last.tokens_per_s)} tokens/s  {sparkline(last.tokens_over_time)}  over {last.duration_s:.1f} s"
    yield (
        f"{last.num_requests} requests, {last.requests_per_s:.2f} answered a second; prompt tokens "
        f"{last.prompt_tokens}, of them from the cache {last.cached_tokens}; new tokens {last.completion_tokens}"
    )
    if last.counted_by != "server" and last.completion_tokens:
        yield "tokens are counted by pieces of text: the server does not say how many there are"
    if last.goodput is not None and last.good_share is not None:
        yield f"goodput {last.goodput:.2f} requests/s: {last.good_share:.0%} met the objective"
    if last.late_s >= LATE_S:
        yield f"requests were sent up to {seconds(last.late_s)} s late, which counts as waiting: this side is slow"
    if last.num_failed:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in last.errors.items())
        yield f"{last.num_failed} failed: {kinds}"
    if len(runs) > 1:
        rates = [run.tokens_per_s for run in runs]
        yield f"tokens/s over {len(runs)} runs: {_median(rates)} {_ends(rates)}; the table is the last run's"


def said(name: str) -> str:
    """A figure's name for people."""
    kind, _, share = name.partition(" ")
    return f"{NAMES[kind]} {share}" if kind in NAMES else name.replace("_per_s", "/s")


def rate(value: float) -> str:
    """Three or four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _median(rates: Sequence[float]) -> str:
    return rate(span(rates)[0])


def _ends(rates: Sequence[float]) -> str:
    """The range of several rates; nothing of one."""
    _, least, largest = span(rates)
    return f"({rate(least)} to {rate(largest)})" if len(rates) > 1 else ""


def _say(*lines: str) -> None:
    """Lines on stdout; what a server said of itself is in some."""
    render.put(render.harmless("".join(f"{line}\n" for line in lines)))


def _table(*titles: str, text: Sequence[int] = ()) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, title in enumerate(titles):
        justify: Any = "left" if place in text else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    return table


def _print(table: "Table") -> None:
    from rich.console import Console

    terminal = render.is_terminal(sys.stdout)
    console = Console(
        file=sys.stdout,
        width=None if terminal else PIPE_COLUMNS,
        no_color=not config.wants_colour(),
        force_terminal=terminal and not config.is_dumb(),
        highlight=False,
    )
    console.print(table)
