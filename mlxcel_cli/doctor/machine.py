"""MLX, kernels and threads, as a process of its own finds them: one that MLX takes down is a finding as well."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from engine.errors import NO_BACKEND
from mlxcel_cli.doctor.finding import Finding, State

PATIENCE_S = 120.0
NATIVE = "`make setup` builds them with a C++20 compiler, or install the wheel mlxcel_native: many times faster"


def look(num_threads: int) -> Iterator[Finding]:
    """`num_threads` is the setting."""
    said, fault = _asked(num_threads)
    if said is None:
        hint = NO_BACKEND if "mlx" in fault else "python -m engine.machine shows all of it"
        yield Finding("backend", State.BROKEN, f"MLX does not run: {fault}", hint)
        return
    yield from judged(said, num_threads)


def judged(said: dict[str, Any], num_threads: int) -> Iterator[Finding]:
    """What `engine.machine` says, judged."""
    versions = f"mlx {said['mlx']}, mlx-lm {said['mlx_lm']}, computing on the {said['device']}"
    if not said["computes"]:
        yield Finding("backend", State.BROKEN, f"{versions}: a sum came out wrong", "install mlx again")
    else:
        yield Finding("backend", State.OK, versions)
    portable_on_cpu = not said["native"] and said["device"] == "cpu"
    kernels = State.WARNING if portable_on_cpu else State.OK
    yield Finding("kernels", kernels, said["kernels"], NATIVE if portable_on_cpu else "")
    cores = f"{said['num_threads']} of {said['cores']} usable cores"
    if num_threads > said["cores"]:
        yield Finding("threads", State.WARNING, f"{cores}: they take turns", "leave --threads out")
    else:
        yield Finding("threads", State.OK, cores)


def _asked(num_threads: int) -> tuple[dict[str, Any] | None, str]:
    """What the process says, or the last words it had."""
    command = [sys.executable, "-m", "engine.machine", str(num_threads)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{error}"
    if ended.returncode != 0:
        words = [line for line in ended.stderr.splitlines() if line.strip()]
        return None, words[-1] if words else f"its process ended with {ended.returncode}"
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said, ""
