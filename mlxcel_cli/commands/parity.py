"""`mlxcel parity`: the same requests through every front of the program."""

import json
from typing import Annotated

import typer

from mlxcel_cli import checkpoint, config, names, render

EXAMPLE = """\b
Examples:
  mlxcel parity smollm2-135m
  mlxcel parity ./my-model --expect-identical --json
"""


def parity(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="the model to compare with", show_default=False, autocompletion=names.known
        ),
    ],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", min=1, help="new tokens in each answer")
    ] = 24,
    expect_identical: Annotated[
        bool, typer.Option("--expect-identical", help="exit with 1 unless every answer is the same")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
) -> None:
    """Compare answers: the bare engine, in process, and served, alone, in company and from the prompt cache."""
    path = checkpoint.folder(config.settle({}, model=model).model or model)

    import asyncio

    from mlxcel_cli.parity import compare

    status = render.Status()
    try:
        report = asyncio.run(compare(model, path, max_tokens, tell=status.show))
    finally:
        status.clear()
    if as_json:
        render.put(json.dumps(report.body(), indent=2, ensure_ascii=False) + "\n")
    else:
        cells = [
            (
                one.case,
                one.arm,
                "identical" if one.identical else one.difference,
                str(one.cached_tokens) if one.cached_tokens else "",
            )
            for one in report.comparisons
        ]
        render.put(render.table([("CASE", "FRONT", "BESIDE THE BARE ENGINE", "CACHED"), *cells]))
    raise typer.Exit(1 if expect_identical and not report.identical else 0)
