"""Log lines as text and as JSON: whole lines, whatever is in them."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServerConfig
from server.logs import handler

VALUES = ["plain", "two words", 'a "quote"', "a=b", "line\nbreak", "\u2028", "\x1b[31m", "", "ü"]


def line(log_format: str, message: str, *, fault: bool = False, **fields: Any) -> str:
    """What is written for one record."""
    record = logging.LogRecord("server.record", logging.INFO, __file__, 1, message, (), None)
    if fields:
        record.fields = fields
    if fault:
        try:
            raise ValueError("broken")
        except ValueError:
            record.exc_info = sys.exc_info()
    return handler(log_format).format(record)


@pytest.mark.parametrize("value", [*VALUES, 5, 1.5])
def test_a_field_cannot_be_mistaken_for_two_or_for_a_line(value: Any) -> None:
    text = line("text", "request", id=value, reason="stop")
    assert text.isprintable()
    found = re.search(r' INFO request id=("(?:[^"\\]|\\.)*"|\S+) reason=stop$', text)
    assert found, text
    shown = found[1]
    assert (json.loads(shown) if shown.startswith('"') else shown) == str(value)
    assert json.loads(line("json", "request", id=value))["id"] == value


@pytest.mark.parametrize("message", VALUES)
def test_json_is_one_object_a_line(message: str) -> None:
    written = line("json", message, fault=True)
    assert "\n" not in written
    said = json.loads(written)
    assert (said["level"], said["logger"], said["message"]) == ("info", "server.record", message)
    assert said["fault"].endswith("ValueError: broken")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", said["time"])


def test_text_shows_the_fault_below_the_fields() -> None:
    first, *rest = line("text", "it broke", fault=True, id="a").splitlines()
    assert first.endswith("it broke id=a")
    assert rest[-1] == "ValueError: broken"


@pytest.mark.parametrize("setting", ["log_level", "log_format"])
def test_what_is_no_level_or_format_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be one of"):
        ServerConfig(EngineConfig(model=tmp_path), "tiny", **{setting: "loud"})


def test_serve_writes_json_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-m", "mlxcel_cli.main", "serve", str(tiny), "--host", str(path)]
    with subprocess.Popen(
        [*command, "--log-format", "json", "--log-level", "info"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for written in process.stderr:
            lines.append(json.loads(written))
            if "is served at" in lines[-1]["message"]:
                break
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://tiny", timeout=60) as c:
            assert c.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4}).status_code == 200
        process.terminate()
        lines += [json.loads(written) for written in process.stderr]
        assert process.wait(60) == 0
    [request] = [said for said in lines if said["message"] == "request"]
    assert (request["route"], request["completion_tokens"]) == ("POST /v1/completions", 4)
