"""`mlxcel convert`: a model written again with fewer bits a weight, and what that cost."""

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxcel_cli import config, names, render
from mlxcel_cli.commands.options import ConfigFile
from mlxcel_cli.errors import WrongUsage

if TYPE_CHECKING:
    from engine.model.conversion import Conversion
    from engine.model.convert import Converted

EXAMPLE = """\b
Examples:
  mlxcel convert Qwen/Qwen3-0.6B --bits 4
  mlxcel convert ./my-model my-model-small --mixed 3_6
  mlxcel convert model.gguf --bits none --dtype bfloat16 --output ./model

What is quantized already is dequantized first; what it has lost stays lost. The result is measured on a text, as
the source is, and kept if its perplexity is at most 1.5 times as high (3 times with 3 bits, 10 with 2).
"""
UNPACKED = "none"


@config.takes("trust_remote_code")
def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="a folder, a .gguf file, owner/name, or a built-in name",
            show_default=False,
            autocompletion=names.known,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(help="what the store is to call the result [default: owner/name-4bit]", show_default=False),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", "-b", metavar="2|3|4|5|6|8|none", help="bits a weight; none: dequantize [default: 4]"
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", "-g", metavar="32|64|128", help="how many weights share a scale [default: 64]"
        ),
    ] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            "--mixed", metavar="2_6|3_4|3_6|4_6", help="mlx-lm's recipe: the second bits for some layers"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bfloat16|float16|float32",
            help="type of scales and of what is not quantized [default: the model's]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="write a folder, not into the store")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace what has that name")] = False,
    max_loss: Annotated[
        float | None,
        typer.Option("--max-loss", metavar="X", help="keep it up to X times the source's perplexity"),
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="measure nothing and keep what comes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object in place of the path")] = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Quantize a model into the store, and say how much worse it became."""
    if name is not None and output is not None:
        raise WrongUsage("a NAME is the store's and --output a folder's: give one of them")
    if mixed is not None and bits is not None:
        raise WrongUsage("--mixed says the bits itself: leave --bits out")
    if bits == UNPACKED and group_size is not None:
        raise WrongUsage("nothing is quantized with --bits none: leave --group-size out")
    if no_check and max_loss is not None:
        raise WrongUsage("--no-check measures nothing that --max-loss could bound")
    trusts = config.settle(config.finite(flags), file=config_file).values.get("trust_remote_code", False)
    asked = _asked(
        bits=_bits(bits),
        group_size=group_size,
        mixed=mixed,
        dtype=dtype,
        max_loss=max_loss,
        measures=not no_check,
        trust_remote_code=trusts,
    )
    from engine.model.convert import convert as run
    from engine.model.store import Store

    began_s = time.monotonic()
    with render.fetching(model) as progress:
        done = run(model, asked, name=name, output=output, replaces=force, progress=progress)
    took_s = time.monotonic() - began_s
    for line in _lines(asked, done, took_s):
        render.note(line)
    if done.name is not None:
        render.note(f"mlxcel run {Store().look(done.name).short_name} runs it")
    render.put(json.dumps(_object(asked, done, took_s), indent=2) + "\n" if as_json else f"{done.path}\n")


def _asked(**given: Any) -> "Conversion":
    """What the flags ask for; those that were not given (None) are left to their defaults."""
    from engine.model.conversion import Conversion

    said = {name: value for name, value in given.items() if value is not None}
    return Conversion(**(said | {"bits": None} if said.get("bits") == UNPACKED else said))


def _bits(said: str | None) -> int | str | None:
    """A number of bits, `none`, or None for nothing said."""
    if said is None or said == UNPACKED:
        return said
    try:
        return int(said)
    except ValueError:
        raise typer.BadParameter(f"{said!r} is no number of bits", param_hint="--bits") from None


def _object(asked: "Conversion", done: "Converted", took_s: float) -> dict[str, Any]:
    before, after = done.source_perplexity, done.perplexity
    return {
        "name": done.name,
        "path": str(done.path),
        "source": str(done.source),
        "source_was": done.was_packed or None,
        "bits": asked.bits if asked.mixed is None else None,
        "mixed": asked.mixed,
        "group_size": asked.group_size if asked.packs else None,
        "dtypes": list(done.dtypes),
        "bits_per_weight": done.bits_per_weight,
        "source_bytes": done.source_bytes,
        "size_bytes": done.size_bytes,
        "quantized_layers": done.num_packed,
        "left_layers": [dataclasses.asdict(left) for left in done.left],
        "perplexity": None
        if before is None or after is None
        else {"source": before.value, "result": after.value, "ratio": done.loss, "tokens": after.num_tokens},
        "seconds": took_s,
    }


def _lines(asked: "Conversion", done: "Converted", took_s: float) -> Iterator[str]:
    """What happened, for people."""
    if done.was_packed:
        yield f"it was quantized before ({done.was_packed}): what that had lost stays lost"
    for why in dict.fromkeys(left.why for left in done.left):
        layers = [left.layer for left in done.left if left.why == why]
        yield f"{render.count(len(layers), 'layer')} not as asked ({why}): {_grouped(layers)}"
    sizes = f"{render.size(done.source_bytes)} to {render.size(done.size_bytes)}"
    yield f"{sizes}, {done.bits_per_weight:.2f} bits a weight, in {took_s:.0f} s"
    if (before := done.source_perplexity) is not None and (after := done.perplexity) is not None:
        times = f"{done.loss:.2f}" if done.loss < 100 else f"{done.loss:.3g}"
        figures = f"{before.value:.4g} to {after.value:.4g} ({times} times)"
        yield f"perplexity {figures} over {render.count(after.num_tokens, 'token')}"


def _grouped(layers: list[str]) -> str:
    """Layers' names, those that differ by a number once."""
    counted = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", layer) for layer in layers)
    return ", ".join(f"{name} ({number})" if number > 1 else name for name, number in counted.items())
