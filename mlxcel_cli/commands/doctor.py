"""`mlxcel doctor`: what on this machine would keep models from running, and what to do about it."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxcel_cli import config, names, render
from mlxcel_cli.commands.options import ConfigFile

if TYPE_CHECKING:
    from mlxcel_cli.doctor.finding import Finding

EXAMPLE = """\b
Examples:
  mlxcel doctor
  mlxcel doctor smollm2-135m --hashes
  mlxcel doctor --offline --json

It mends nothing, and exits with 1 if something is broken.
"""
COLOURS = {"ok": "\x1b[32m", "note": render.CYAN, "warning": "\x1b[33m", "broken": render.RED}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="the model that has to fit [default: $MLXCEL_MODEL, else smollm2-135m]",
            show_default=False,
            autocompletion=names.stored,
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="ask nothing of the network")] = False,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="read every stored file whose content the hub has told: a second a GB")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of lines")] = False,
    config_file: ConfigFile = None,
) -> None:
    """Look for what would keep models from running here: backend, memory, store, port, settings, network."""
    from mlxcel_cli.doctor.finding import State

    findings: list[Finding] = []
    for finding in _findings(model, config_file, offline=offline, hashes=hashes):
        findings.append(finding)
        if not as_json:
            _show(finding)
    broken = any(finding.state is State.BROKEN for finding in findings)
    if as_json:
        body = {"ok": not broken, "findings": [dataclasses.asdict(finding) for finding in findings]}
        render.put(json.dumps(body, indent=2) + "\n")
    raise typer.Exit(1 if broken else 0)


def _findings(model: str | None, file: Path | None, *, offline: bool, hashes: bool) -> Iterator["Finding"]:
    """Everything, as it is found. Settings that cannot be settled count as not given from there on."""
    from mlxcel_cli.doctor import machine, network, storage
    from mlxcel_cli.doctor.finding import Finding, State

    settings = config.Settings({})
    remarks = list(config.remarks(file))
    for remark in remarks:
        yield Finding("settings", State.BROKEN if remark.is_error else State.NOTE, remark.said, remark.hint)
    if not any(remark.is_error for remark in remarks):
        settings = config.settle({}, file=file)
        yield Finding("settings", State.OK, f"{len(settings.values)} settings differ from the defaults")
    backend = list(machine.look(settings.values.get("threads", 0)))
    yield from backend
    if backend[0].state is State.OK:
        yield from storage.look_at_memory(settings, model)
    yield from storage.look_at_store(hashes=hashes)
    yield from storage.look_at_disk()
    yield from network.look_at_port(settings)
    yield from network.look_at_proxies()
    if not offline:
        yield from network.look_at_hub()


def _show(finding: "Finding") -> None:
    coloured = render.is_terminal(sys.stdout) and config.wants_colour()
    colour, plain = (COLOURS[finding.state], render.PLAIN) if coloured else ("", "")
    render.put(f"{colour}{finding.state:8}{plain} {finding.area:9} {finding.said}\n")
    if finding.hint:
        render.put(f"{'':18} hint: {finding.hint}\n")
