"""What `engine.machine` says becomes findings, and so does that it says nothing."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.machine import machine as examined
from mlxcel_cli.doctor import machine
from mlxcel_cli.doctor.finding import State

SAID: dict[str, Any] = {
    "mlx": "0.32.4",
    "mlx_lm": "0.32.2",
    "device": "cpu",
    "computes": True,
    "kernels": "native (AVX2, 2 threads)",
    "native": True,
    "num_threads": 2,
    "cores": 2,
}


def states(num_threads: int = 0, **said: Any) -> dict[str, State]:
    return {finding.area: finding.state for finding in machine.judged(SAID | said, num_threads)}


def test_all_is_well_where_kernels_are_compiled():
    assert states() == {"backend": State.OK, "kernels": State.OK, "threads": State.OK}


def test_a_portable_cpu_is_warned_of_with_what_to_do():
    (finding,) = [f for f in machine.judged(SAID | {"native": False, "kernels": "portable (why)"}, 0) if f.hint]
    assert (finding.area, finding.state, finding.said) == ("kernels", State.WARNING, "portable (why)")
    assert "make setup" in finding.hint


def test_a_gpu_needs_no_compiled_kernels():
    assert states(native=False, device="gpu")["kernels"] is State.OK


def test_wrong_sums_and_too_many_threads_are_seen():
    assert states(computes=False)["backend"] is State.BROKEN
    assert states(num_threads=8)["threads"] is State.WARNING


def test_an_mlx_that_does_not_load_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ImportError: libmlx.so: no such file' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    (finding,) = machine.look(0)
    assert (finding.area, finding.state) == ("backend", State.BROKEN)
    assert "ImportError: libmlx.so" in finding.said
    assert "mlxcel[cpu]" in finding.hint


def test_an_mlx_that_takes_its_process_down_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -ILL $$\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    (finding,) = machine.look(0)
    assert finding.state is State.BROKEN
    assert finding.hint


def test_this_machine_is_examined():
    said = examined()
    assert json.loads(json.dumps(said)) == said
    assert set(said) == set(SAID)
    assert said["computes"]
    assert said["num_threads"] >= 1
