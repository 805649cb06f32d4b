"""The model store, the disk below it, and whether a model fits into memory."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import MlxcelError
from mlxcel_cli import config, names, render
from mlxcel_cli.doctor.finding import Finding, State

LITTLE_BYTES = 2_000_000_000


def look_at_store(*, hashes: bool) -> Iterator[Finding]:
    """Every model's files; with `hashes` their content as well, where the hub has said what it is."""
    from engine.model.integrity import check
    from engine.model.store import Store

    store = Store()
    num_whole = num_hashed = 0
    for checked in check(store, hashes=hashes):
        if checked.unfinished:
            hint = f"mlxcel pull {checked.name} begins again or goes on; mlxcel rm {checked.name} drops it"
            yield Finding("store", State.NOTE, f"{checked.name}: {checked.fault}", hint)
        elif checked.fault:
            hint = f"mlxcel pull {checked.name} --force, or mlxcel rm {checked.name}"
            yield Finding("store", State.BROKEN, f"{checked.name}: {checked.fault}", hint)
        else:
            num_whole += 1
        num_hashed += checked.num_hashed
    read = f", {num_hashed} files hold what the hub lists" if hashes else ""
    said = f"{num_whole} whole model{'' if num_whole == 1 else 's'} in {store.models}{read}"
    state, hint = (State.OK, "") if num_whole else (State.NOTE, f"mlxcel pull {config.BUILT_IN_MODEL}")
    yield Finding("store", state, said, hint)


def look_at_disk() -> Iterator[Finding]:
    """Room for models, and whether the store's folder may be written."""
    from engine.model.store import default_home

    place = home = default_home()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "cannot be written" if place.is_dir() else "is no folder"
        yield Finding("disk", State.BROKEN, f"{place} {why}", "MLXCEL_HOME names another place")
        return
    free = shutil.disk_usage(place).free
    little = free < LITTLE_BYTES
    hint = "mlxcel rm deletes a model; MLXCEL_HOME names another place" if little else ""
    yield Finding("disk", State.WARNING if little else State.OK, f"{render.size(free)} free for {home}", hint)


def look_at_memory(settings: config.Settings, model: str | None) -> Iterator[Finding]:
    """Whether the model fits with these settings: the one that is named, else the one that commands would take."""
    from mlxcel_cli.commands.inspect import described, memory

    named = model or settings.model
    reference = named or config.BUILT_IN_MODEL
    try:
        path = names.here(reference)
    except MlxcelError as error:
        state = State.BROKEN if named else State.NOTE
        yield Finding("memory", state, str(error), error.hint or f"mlxcel pull {reference}")
        return
    try:
        _, fit, largest = described(path, settings.engine(Path(path)))
    except (MlxcelError, ImportError) as error:
        yield Finding("memory", State.BROKEN, f"{reference}: {error}", getattr(error, "hint", ""))
        return
    if fit.fits:
        yield Finding("memory", State.OK, f"{reference}: {memory(fit)}")
        return
    state = State.WARNING if largest else State.BROKEN
    hint = f"--ctx-size {largest} fits, and a smaller --parallel more" if largest else "take a smaller model"
    yield Finding("memory", state, f"{reference}: {memory(fit)}", hint)
