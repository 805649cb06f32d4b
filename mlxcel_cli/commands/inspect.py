"""`mlxcel inspect`: what a model is and whether it fits, before it is loaded."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxcel_cli import config, names, render
from mlxcel_cli.commands.options import ConfigFile

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.model.inspect import Description, Fit, Layers

EXAMPLE = """\b
Examples:
  mlxcel inspect smollm2-135m
  mlxcel inspect ./my-model --ctx-size 32768 --parallel 8
  mlxcel inspect smollm2-135m --json

It reads headers and small files only, and fetches nothing. Without --ctx-size and --parallel it says what `serve`
would take with the settings of environment and config file.
"""
UNPROBED = "found by a probe when the model is first loaded"


@config.takes("ctx_size", "parallel", "kv_unified", "kv_cache_budget", "cache_dtype", "trust_remote_code")
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="a folder, a .gguf file, or a model's name in `mlxcel list`",
            show_default=False,
            autocompletion=names.stored,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
    config_file: ConfigFile = None,
    **flags: Any,
) -> None:
    """Say what a model is, what it keeps per token and what fits, without loading it."""
    path = names.here(model)
    engine = config.settle(config.finite(flags), file=config_file).engine(path)

    said, fit, largest = described(path, engine)
    if as_json:
        render.put(json.dumps(_object(model, said, fit, largest), indent=2, default=str) + "\n")
    else:
        width = max(len(name) for name, _ in _lines(model, said, fit, largest))
        render.put("".join(f"{name:{width}}  {text}\n" for name, text in _lines(model, said, fit, largest)))


def described(path: Path, engine: "EngineConfig") -> "tuple[Description, Fit, int]":
    """The checkpoint at `path`, what it will take with these settings, and the longest context that fits them.

    Raises ModelError.
    """
    from engine.model.inspect import describe

    said = describe(path, trust_remote_code=engine.trust_remote_code, cache_dtype=engine.cache_dtype)
    num_slots = engine.num_slots(batches=said.decode_mode != "alone")
    paged = engine.pages_rows(pageable=said.pageable, num_slots=num_slots)
    fit = said.fit(
        num_slots,
        engine.slot_context(said.context_length, num_slots),
        asked=engine.kv_cache_budget,
        chunk_tokens=engine.prefill_chunk_size,
        paged=paged,
    )
    return said, fit, said.largest_context(fit.num_slots, paged=paged)


def _object(model: str, said: "Description", fit: "Fit", largest: int) -> dict[str, Any]:
    end_tokens = [{"id": index, "text": text} for index, text in said.end_tokens]
    return {
        "model": model,
        **dataclasses.asdict(said),
        "end_tokens": end_tokens,
        "token_bytes": said.token_bytes,
        "bounded_bytes": said.bounded_bytes,
        "fit": {**dataclasses.asdict(fit), "total_bytes": fit.total_bytes, "fits": fit.fits},
        "largest_context": largest,
    }


def _lines(model: str, said: "Description", fit: "Fit", largest: int) -> Iterator[tuple[str, str]]:
    """What the table says, as (name, text)."""
    yield "model", model if Path(model) == said.path else f"{model} ({said.path})"
    yield "architecture", f"{said.architecture} ({said.model_type})"
    if not said.continues:
        yield "gives", "embeddings, and continues nothing"
    yield "parameters", _count(said.num_parameters)
    yield "weights", _weights(said)
    for packing in said.packings:
        share = _count(packing.num_parameters)
        yield (
            "quantization",
            f"{packing.bits}-bit {packing.mode}, groups of {packing.group_size}: {share} parameters",
        )
    for group in said.layers:
        yield "layers", _layers(group)
    yield "cache", _cache(said)
    yield (
        "context",
        f"{said.context_length} tokens" + ("" if said.context_is_stated else ", assumed: it states none"),
    )
    yield "vocabulary", f"{said.vocab_size} tokens"
    yield "tokenizer", f"{said.tokenizer}, {'with a' if said.has_chat_template else 'no'} chat template"
    yield (
        "ends with",
        ", ".join(f"{text} ({index})" for index, text in said.end_tokens) or "nothing: no end is stated",
    )
    yield "decode mode", said.decode_mode or UNPROBED
    yield "memory", memory(fit)
    yield "budget", _budget(fit)
    yield "fits", _verdict(said, fit, largest)


def _weights(said: "Description") -> str:
    text = f"{' and '.join(said.dtypes)}, " if not said.packings else ""
    text += f"{render.size(said.file_bytes)} on disk, {render.size(said.weight_bytes)} in memory"
    return text + (", expanded to float32: no quantized kernel here" if said.expands else "")


def _layers(group: "Layers") -> str:
    keeps = {
        "full": "full attention",
        "window": f"sliding window of {group.window} tokens",
        "state": "state of a fixed size" if group.fixed_bytes else "nothing kept",
    }[group.kind]
    return f"{group.count} x {keeps}"


def _cache(said: "Description") -> str:
    parts = []
    if said.token_bytes:
        parts.append(f"{render.size(said.token_bytes)} for each token")
    if said.bounded_bytes:
        parts.append(f"{render.size(said.bounded_bytes)} at most in windows and states")
    return ", ".join(parts) or "none"


def memory(fit: "Fit") -> str:
    rows = f"{fit.num_slots} slot{'s' if fit.num_slots > 1 else ''} x {fit.num_tokens} tokens"
    return (
        f"{render.size(fit.weight_bytes)} weights + up to {render.size(fit.num_slots * fit.row_bytes)} for {rows} "
        f"= {render.size(fit.total_bytes)} of {render.size(fit.available_bytes)} free"
    )


def _budget(fit: "Fit") -> str:
    if fit.budget_bytes is None:
        return "rows and prompt cache are not bounded, as asked"
    return f"{render.size(fit.budget_bytes)} for rows and prompt cache"


def _verdict(said: "Description", fit: "Fit", largest: int) -> str:
    slots = f"{fit.num_slots} slot{'s' if fit.num_slots > 1 else ''}"
    if fit.fits:
        if largest == said.context_length:
            return f"yes; {slots} can hold the model's whole context"
        return f"yes; {slots} can hold {largest} tokens each at most"
    return f"no; {slots} can hold {largest} tokens each" if largest else f"no; not even one token in {slots}"


def _count(number: int) -> str:
    """A number of parameters as people say it: 135M, 1.2B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return str(number)
