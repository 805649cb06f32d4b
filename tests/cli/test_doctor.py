"""`mlxcel doctor` as a whole: lines with hints, JSON, the exit code."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.model.store import Store
from mlxcel_cli.doctor import machine
from tests.cli.conftest import Outcome
from tests.cli.doctor.test_machine import SAID
from tests.tiny import write_checkpoint

Mlxcel = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is well, with one model, a free port and no proxy."""
    monkeypatch.setattr(machine, "_asked", lambda num_threads: (SAID, ""))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("MLXCEL_PORT", "0")
    with Store().begin("mlx-community/tiny", source="made here") as folder:
        write_checkpoint(folder)


def states(out: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in json.loads(out)["findings"]:
        found.setdefault(finding["area"], set()).add(finding["state"])
    return found


def test_a_healthy_machine_ends_with_0(mlxcel: Mlxcel) -> None:
    ended = mlxcel("doctor", "tiny", "--offline", "--json")
    assert ended.code == 0
    areas = ("settings", "backend", "kernels", "threads", "memory", "store", "disk", "port", "proxy")
    assert states(ended.out) == {area: {"ok"} for area in areas}
    assert json.loads(ended.out)["ok"] is True


def test_what_is_broken_ends_with_1_and_has_a_hint(mlxcel: Mlxcel) -> None:
    (Store().models / "mlx-community/tiny/tokenizer.json").unlink()
    ended = mlxcel("doctor", "--offline")
    assert ended.code == 1
    lines = ended.out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("broken")]
    assert "mlx-community/tiny" in lines[place]
    assert lines[place + 1].strip().startswith("hint: mlxcel pull mlx-community/tiny --force")
    assert "\x1b" not in ended.out


def test_every_unknown_and_wrong_setting_is_found(
    mlxcel: Mlxcel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.toml"
    file.write_text('prot = 1\nparallel = "two"\nport = 3\n')
    monkeypatch.setenv("MLXCEL_CONFIG", str(file))
    monkeypatch.setenv("MLXCEL_PARALEL", "4")
    monkeypatch.setenv("MLXCEL_WHATEVER", "1")
    ended = mlxcel("doctor", "--offline", "--json")
    assert ended.code == 1
    said: dict[str, Any] = {f["said"]: f for f in json.loads(ended.out)["findings"] if f["area"] == "settings"}
    assert len(said) == 5
    assert said[f"unknown setting prot in {file}"]["hint"] == "did you mean port?"
    assert said["unknown variable MLXCEL_PARALEL"]["hint"] == "did you mean MLXCEL_PARALLEL?"
    assert said["MLXCEL_WHATEVER means nothing to mlxcel"]["state"] == "note"
    assert said[f"MLXCEL_PORT is used in place of port in {file}"]["state"] == "note"
    assert any("parallel" in line and "must be a whole number" in line for line in said)


def test_a_config_file_that_is_no_toml_is_broken(mlxcel: Mlxcel, tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_text("port = = 3")
    ended = mlxcel("doctor", "--offline", "--config", str(file))
    assert ended.code == 1
    assert "is not TOML" in ended.out


@pytest.mark.parametrize("key", ["port = 99999999", "parallel = -7", "stall-timeout = nan", 'log-level = "loud"'])
def test_a_setting_out_of_its_bounds_is_found_by_file_and_name(mlxcel: Mlxcel, tmp_path: Path, key: str) -> None:
    file = tmp_path / "it.toml"
    file.write_text(key)
    ended = mlxcel("doctor", "--offline", "--config", str(file))
    assert ended.code == 1
    (line,) = [line for line in ended.out.splitlines() if line.startswith("broken")]
    assert f"{key.split()[0]} in {file} must be " in line


def test_a_variable_out_of_its_bounds_is_found(mlxcel: Mlxcel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_PORT", "99999999")
    ended = mlxcel("doctor", "--offline")
    assert ended.code == 1
    assert "MLXCEL_PORT must be at most 65535, not " in ended.out


def test_a_pipe_in_place_of_a_model_is_found_at_once(mlxcel: Mlxcel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = mlxcel("doctor", str(tmp_path / "pipe"), "--offline")
    assert ended.code == 1
    lines = ended.out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("broken")]
    assert lines[place].endswith(f"{tmp_path / 'pipe'} is neither a folder nor a file")
    assert lines[place + 1].strip().startswith("hint: ")
