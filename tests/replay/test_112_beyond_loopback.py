"""Case 112: beyond this machine a key is needed, or a flag that names the risk; on it neither is."""

from pathlib import Path
from typing import Any

import pytest

from mlxcel_cli.main import outcome
from server import run
from server.config import ServerConfig

BEYOND = ("0.0.0.0", "::", "192.168.1.5", "box.lan")
HERE = ("127.0.0.1", "::1", "localhost", "/tmp/m.sock")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What `serve` would have started."""
    configs: list[ServerConfig] = []

    def serve(config: ServerConfig, *arguments: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(run, "serve", serve)
    return configs


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_this_machine(
    tiny: Path, tmp_path: Path, started: list[ServerConfig], capsys: pytest.CaptureFixture[str], host: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-first\n")
    asked = ["serve", str(tiny), "--host", host]
    assert outcome(asked) == 1
    assert started == []
    said = capsys.readouterr().err
    assert f"refusing to listen on {host}" in said
    assert "--api-key-file" in said
    assert "--insecure-no-auth" in said
    for allowed in (["--api-key", "sk-first"], ["--api-key-file", str(keys)], ["--insecure-no-auth"]):
        assert outcome([*asked, *allowed]) == 0
    assert [config.needs_key for config in started] == [True, True, False]


@pytest.mark.parametrize("host", HERE)
def test_on_this_machine(tiny: Path, started: list[ServerConfig], host: str) -> None:
    assert outcome(["serve", str(tiny), "--host", host]) == 0
    assert not started[0].needs_key


def test_an_empty_key_is_no_key(
    tiny: Path, started: list[ServerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(["serve", str(tiny), "--api-key", ""]) == 1
    assert started == []
    assert "empty" in capsys.readouterr().err
