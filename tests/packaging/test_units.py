"""The units in docs/deploy start the program with settings that it has, and give it the time to stop."""

import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxcel_cli import config
from mlxcel_cli.main import COMMANDS, FAILED, USAGE
from server.run import ENDING_S, GRACE_S

FOLDER = Path(__file__).parents[2] / "docs/deploy"
SERVICE, PLIST, FORMULA = (FOLDER / f"mlxcel.{kind}" for kind in ("service", "plist", "rb"))
VARIABLES = {row.variable for row in config.table().values()} | set(config.OTHER_VARIABLES)
FLAGS = {flag for row in config.table().values() for said in row.flags for flag in said.split("/")}


def service() -> list[tuple[str, str]]:
    """Keys and values, those that are commented out as well."""
    return re.findall(r"^#?(\w+)=(.*)$", SERVICE.read_text(), re.MULTILINE)


def starts(command: list[str]) -> None:
    """Hold that this is a command of the program with flags that it has."""
    program, name, *flags = command
    assert program.endswith("/mlxcel")
    assert name in COMMANDS
    assert {flag for flag in flags if flag.startswith("-")} <= FLAGS


@pytest.mark.parametrize("unit", [SERVICE, PLIST, FORMULA], ids=lambda unit: unit.suffix)
def test_every_variable_is_a_setting(unit: Path) -> None:
    named = set(re.findall(r"\bMLXCEL_[A-Z_]+", unit.read_text()))
    assert named
    assert named <= VARIABLES


@pytest.mark.parametrize("unit", [SERVICE, PLIST, FORMULA], ids=lambda unit: unit.suffix)
def test_every_value_is_one_that_the_setting_takes(unit: Path) -> None:
    said = re.findall(r'\b(MLXCEL_\w+)(?:=|: "|</key>\s*<string>)([\w.-]+)', unit.read_text())
    assert ("MLXCEL_PORT", "8080") in said
    settings = config.settle({}, environment={**dict(said), "XDG_CONFIG_HOME": "/nowhere"})
    assert settings.values["port"] == 8080
    assert settings.model == config.BUILT_IN_MODEL


def test_the_service_starts_the_server_and_waits_for_its_end() -> None:
    keys = dict(service())
    starts(keys["ExecStart"].split())
    assert int(keys["TimeoutStopSec"]) > GRACE_S + ENDING_S
    assert keys["Restart"] == "on-failure"
    assert keys["RestartPreventExitStatus"] == str(USAGE) != str(FAILED)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_service(tmp_path: Path) -> None:
    program = shutil.which("true")
    (tmp_path / "mlxcel.service").write_text(SERVICE.read_text().replace("/usr/local/bin/mlxcel", str(program)))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "mlxcel.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, [line for line in ended.stderr.splitlines() if "mlxcel.service" in line]) == (0, [])


def test_the_agent_starts_the_server_and_waits_for_its_end() -> None:
    agent = plistlib.loads(PLIST.read_bytes())
    starts(agent["ProgramArguments"])
    assert agent["ExitTimeOut"] > GRACE_S + ENDING_S
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert all(isinstance(value, str) for value in agent["EnvironmentVariables"].values())


def test_the_formula_installs_this_version_and_starts_the_server() -> None:
    formula = FORMULA.read_text()
    (command,) = re.findall(r"run \[opt_bin/\"mlxcel\", (.*)\]", formula)
    starts(["/mlxcel", *re.findall(r'"([^"]+)"', command)])
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert f"/mlxcel-{version}.tar.gz" in formula
    for kept in re.findall(r"completions/mlxcel\.\w+", formula):
        assert (FOLDER.parents[1] / kept).is_file()


@pytest.mark.skipif(shutil.which("ruby") is None, reason="Ruby is not here")
def test_ruby_understands_the_formula() -> None:
    subprocess.run(["ruby", "-wc", FORMULA], capture_output=True, check=True)
