"""Whether the compiled package is used, and what is said where it is not."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import native
from tests.tiny import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model")


def kernels_note(checkpoint, **config):
    return Engine.open(EngineConfig(model=checkpoint, **config)).notes[0]


def test_the_start_up_line_says_native(compiled, checkpoint):
    threads = "3 threads" if mx.default_device() == mx.cpu else ""
    assert kernels_note(checkpoint, threads=3) == f"kernels: native ({compiled.levels()[0]}, {threads})"
    assert "1 thread)" in kernels_note(checkpoint, threads=1)


def test_an_absent_package(checkpoint, monkeypatch):
    monkeypatch.setattr(native, "mlxcel_native", None)
    monkeypatch.setattr(native, "_absent", ModuleNotFoundError())
    assert kernels_note(checkpoint).startswith("kernels: portable (no compiled package)")


def test_a_package_that_does_not_load(monkeypatch):
    monkeypatch.setattr(native, "mlxcel_native", None)
    monkeypatch.setattr(native, "_absent", ImportError("undefined symbol"))
    assert native.start() == "the compiled package does not load: undefined symbol"


def test_a_package_for_another_mlx(compiled, monkeypatch):
    version = native.importlib.metadata.version
    monkeypatch.setattr(
        native.importlib.metadata, "version", lambda name: "0.0.0" if name == "mlx" else version(name)
    )
    assert native.start() == f"compiled for mlx {compiled.built_for_mlx}, not 0.0.0"


def test_a_package_that_computes_something_else(compiled, monkeypatch):
    monkeypatch.setattr(native, "linear", lambda x, weight, *_: mx.zeros((x.shape[0], weight.shape[0])))
    assert native.start() == "the compiled package fails its self-test: a product of whole numbers is wrong"


def test_portable_can_be_asked_for(checkpoint):
    assert kernels_note(checkpoint, portable=True).startswith("kernels: portable (as asked)")


def test_the_start_up_lines_say_what_keys_are_stored_as(compiled, checkpoint):
    def cache_note(**config):
        notes = Engine.open(EngineConfig(model=checkpoint, **config)).notes
        return next(note for note in notes if note.startswith("cache: "))

    assert cache_note() == "cache: keys and values as float16"
    assert cache_note(cache_dtype="bfloat16", portable=True) == "cache: keys and values as bfloat16"
    assert cache_note(portable=True) == "cache: keys and values in the model's type"
    state = write_checkpoint(checkpoint.parent / "mamba2", "mamba2")
    said = Engine.open(EngineConfig(model=state)).notes
    assert "cache: what the model keeps, in its own types" in said


FEW_THREADS = """
import resource
import mlx.core as mx
from engine.kernels import native

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
native.start(1)
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), limits[1]))
native.mlxcel_native.set_num_threads(1000)
resource.setrlimit(resource.RLIMIT_AS, limits)
assert 1 <= native.mlxcel_native.num_threads() < 1000
assert mx.array_equal(native.linear(mx.ones((64, 64)), mx.ones((64, 64))), mx.full((64, 64), 64.0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs memory of its own")
def test_as_many_threads_as_the_system_gives(compiled):
    ended = subprocess.run(
        [sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "nonsense"}, 8),
    ],
)
def test_cores_are_counted_within_affinity_and_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda _: range(8), raising=False)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert native.usable_cores(tmp_path) == cores
