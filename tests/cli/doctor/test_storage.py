"""Broken entries, leftovers, content that is not what the hub lists, and memory, as findings."""

import hashlib
import json
from pathlib import Path

import pytest

from engine.model import placement
from engine.model.hub import IDENTITIES
from engine.model.store import Store
from mlxcel_cli import config
from mlxcel_cli.doctor import storage
from mlxcel_cli.doctor.finding import Finding, State
from tests.tiny import write_checkpoint


@pytest.fixture
def store() -> Store:
    store = Store()
    with store.begin("mlx-community/tiny", source="made here") as folder:
        write_checkpoint(folder)
        weights = (folder / "model.safetensors").read_bytes()
        said = {"model.safetensors": hashlib.sha256(weights).hexdigest()}
        (folder / IDENTITIES).write_text(json.dumps(said))
    return store


def found(*, hashes: bool = False) -> list[Finding]:
    return list(storage.look_at_store(hashes=hashes))


def test_a_whole_store_is_ok(store: Store):
    (finding,) = found(hashes=True)
    assert finding.state is State.OK
    assert finding.said.startswith("1 whole model in ")
    assert finding.said.endswith("1 files hold what the hub lists")


def test_an_empty_store_says_how_to_begin():
    (finding,) = found()
    assert (finding.state, finding.hint) == (State.NOTE, "mlxcel pull smollm2-135m")


def test_a_file_of_another_length_is_broken(store: Store):
    (store.models / "mlx-community/tiny/tokenizer.json").write_text("{}")
    broken, _ = found()
    assert broken.state is State.BROKEN
    assert "tokenizer.json is missing or has another size" in broken.said
    assert broken.hint == "mlxcel pull mlx-community/tiny --force, or mlxcel rm mlx-community/tiny"


def test_a_changed_bit_is_found_by_its_hash_alone(store: Store):
    file = store.models / "mlx-community/tiny/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [finding.state for finding in found()] == [State.OK]
    broken, _ = found(hashes=True)
    assert broken.said == "mlx-community/tiny: model.safetensors: the content is not what the hub lists"


def test_what_was_never_completed_and_what_is_left_over_are_told_apart(store: Store):
    (store.models / "someone/half").mkdir(parents=True)
    (store.models / "someone/.other.kept.partial").mkdir()
    (store.models / "someone/.third.01234567.partial").mkdir()
    said = {finding.said.partition(":")[0]: finding for finding in found() if finding.state is not State.OK}
    assert said["someone/half"].state is State.BROKEN
    assert said["someone/other"].state is State.NOTE
    assert "broken off" in said["someone/other"].said
    assert said["someone/third"].hint.endswith("mlxcel rm someone/third drops it")


def test_a_disk_that_is_nearly_full_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    assert [finding.state for finding in storage.look_at_disk()] == [State.OK]
    monkeypatch.setattr(storage, "LITTLE_BYTES", 1 << 62)
    (finding,) = storage.look_at_disk()
    assert (finding.state, finding.hint.split()[:2]) == (State.WARNING, ["mlxcel", "rm"])


@pytest.mark.parametrize("below", ["", "models"])
def test_a_home_that_is_a_file_is_broken(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MLXCEL_HOME", str(file / below))
    (finding,) = storage.look_at_disk()
    assert (finding.state, finding.said) == (State.BROKEN, f"{file} is no folder")
    assert "MLXCEL_HOME" in finding.hint


def test_a_model_that_fits_says_how_much_it_takes(store: Store):
    (finding,) = storage.look_at_memory(config.Settings({}), "tiny")
    assert finding.state is State.OK
    assert "weights" in finding.said


def test_a_named_model_that_is_not_here_is_broken_and_the_default_is_not():
    (named,) = storage.look_at_memory(config.Settings({}), "someone/none")
    (default,) = storage.look_at_memory(config.Settings({}), None)
    assert (named.state, default.state) == (State.BROKEN, State.NOTE)
    assert named.hint
    assert default.hint


def test_a_model_that_does_not_fit_says_what_would(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "available_bytes", lambda: 1_000_000)
    (some,) = storage.look_at_memory(config.Settings({"parallel": 1}), "tiny")
    assert (some.state, some.hint.split()[0]) == (State.WARNING, "--ctx-size")
    monkeypatch.setattr(placement, "available_bytes", lambda: 1_000)
    (none,) = storage.look_at_memory(config.Settings({}), "tiny")
    assert (none.state, none.hint) == (State.BROKEN, "take a smaller model")
