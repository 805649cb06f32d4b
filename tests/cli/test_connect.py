"""`mlxcel connect`: what is printed for each client, what is written, and that no key is ever shown."""

import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_cli import render
from mlxcel_cli.connect.recipes import RECIPES
from tests.cli.conftest import Outcome
from tests.cli.double import Double

Mlxcel = Callable[..., Outcome]
NAMES = [recipe.name for recipe in RECIPES]
WITH_FILE = [recipe.name for recipe in RECIPES if recipe.file]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def guarded(double: Double) -> None:
    """The double asks for a key."""
    listed = double.models

    async def models(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "a key is needed", "code": "invalid_api_key"}}, 401)
        return await listed(request)

    double.models = models  # type: ignore[method-assign]


def test_alone_it_lists_the_clients(mlxcel: Mlxcel) -> None:
    ended = mlxcel("connect")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_client_is_told_url_and_model(name: str, mlxcel: Mlxcel, address: str) -> None:
    ended = mlxcel("connect", name, "--server", address)
    assert ended.code == 0, ended.err
    assert address in ended.out
    assert "double" in ended.out or name == "open-webui"  # it lists the models itself
    assert "https://" in ended.out.splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("guarded")
def test_a_key_is_named_by_its_variable_and_never_shown(name: str, mlxcel: Mlxcel, address: str) -> None:
    ended = mlxcel("connect", name, "--server", address, "--api-key", KEY)
    assert ended.code == 0, ended.err
    assert KEY not in ended.out + ended.err
    assert "MLXCEL_API_KEY" in ended.out


@pytest.mark.usefixtures("guarded")
def test_the_key_comes_from_the_environment_too(
    mlxcel: Mlxcel, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = mlxcel("connect", "curl", "--server", address)
    assert without.code == 1
    assert "set MLXCEL_API_KEY" in without.err
    monkeypatch.setenv("MLXCEL_API_KEY", KEY)
    assert mlxcel("connect", "curl", "--server", address).code == 0


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_key_that_cannot_be_one_is_refused_without_being_shown(
    source: str, mlxcel: Mlxcel, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["connect", "curl", "--server", address]
    if source == "flag":
        asked += ["--api-key", "SEC\nRET"]
    elif source == "environment":
        monkeypatch.setenv("MLXCEL_API_KEY", "SEC\nRET")
    else:
        (home / "c.toml").write_text(r'api_key = ["SEC\nRET"]')
        asked += ["--config", "c.toml"]
    ended = mlxcel(*asked)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: the API key for {address} cannot be one\nhint: ")
    assert "RET" not in ended.err


@pytest.mark.parametrize("name", WITH_FILE)
@pytest.mark.usefixtures("guarded")
def test_a_file_is_written_without_the_key_and_a_second_time_not(
    name: str, mlxcel: Mlxcel, address: str, home: Path
) -> None:
    if name == "librechat":
        (home / "librechat.yaml").write_text("version: 1.2.1\n")
    asked = ("connect", name, "--server", address, "--api-key", KEY, "--write", "--yes")
    ended = mlxcel(*asked)
    assert ended.code == 0, ended.err
    (recipe,) = [recipe for recipe in RECIPES if recipe.name == name]
    assert recipe.file is not None
    path = recipe.file.place()
    assert home in path.resolve().parents
    text = path.read_text()
    assert address in text
    assert KEY not in text + ended.out + ended.err
    again = mlxcel(*asked)
    assert "says so already" in again.err
    assert path.read_text() == text


def test_what_a_file_held_stays_and_is_kept_beside(mlxcel: Mlxcel, address: str, home: Path) -> None:
    path = home / ".claude/settings.json"
    path.parent.mkdir()
    before = json.dumps({"theme": "dark", "env": {"ANTHROPIC_MODEL": "other", "X": "1"}})
    path.write_text(before)
    ended = mlxcel("connect", "claude", "--server", address, "--write", "--yes")
    assert ended.code == 0, ended.err
    found = json.loads(path.read_text())
    assert (found["theme"], found["env"]["X"], found["env"]["ANTHROPIC_MODEL"]) == ("dark", "1", "double")
    assert (path.parent / "settings.json.bak").read_text() == before
    assert "other values stand there and give way: env.ANTHROPIC_MODEL" in ended.err


def test_a_config_with_other_models_gets_one_more(mlxcel: Mlxcel, address: str, home: Path) -> None:
    path = home / ".continue/config.yaml"
    path.parent.mkdir()
    path.write_text(
        "name: Mine\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: Other # good\n    provider: ollama\n"
    )
    ended = mlxcel("connect", "continue", "--server", address, "--write", "--yes")
    assert ended.code == 0, ended.err
    found = yaml.safe_load(path.read_text())
    assert found["name"] == "Mine"
    assert [model["name"] for model in found["models"]] == ["mlxcel double", "Other"]
    assert "# good" in path.read_text()


def test_a_new_config_of_continue_has_what_continue_requires(mlxcel: Mlxcel, address: str, home: Path) -> None:
    assert mlxcel("connect", "continue", "--server", address, "--write", "--yes").code == 0
    found = yaml.safe_load((home / ".continue/config.yaml").read_text())
    assert {"name", "version", "schema", "models"} == set(found)


def test_claude_code_is_told_to_send_what_any_model_knows(mlxcel: Mlxcel, address: str, home: Path) -> None:
    assert mlxcel("connect", "claude", "--server", address, "--write", "--yes").code == 0
    environment = json.loads((home / ".claude/settings.json").read_text())["env"]
    assert environment["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] == "1"
    assert environment["CLAUDE_CODE_EFFORT_LEVEL"] == "auto"


def test_a_profile_of_codex_is_whole(mlxcel: Mlxcel, address: str, home: Path) -> None:
    assert mlxcel("connect", "codex", "--server", address, "--write", "--yes").code == 0
    found = tomllib.loads((home / ".codex/mlxcel.config.toml").read_text())
    provider = {"name": "mlxcel", "base_url": f"{address}/v1", "wire_api": "responses"}
    assert found == {
        "model": "double",
        "model_provider": "mlxcel",
        "web_search": "disabled",
        "agents": {"enabled": False},
        "model_providers": {"mlxcel": provider},
    }


def test_a_file_that_cannot_be_added_to_is_left_with_a_hint(mlxcel: Mlxcel, address: str, home: Path) -> None:
    path = home / "config/zed/settings.json"
    path.parent.mkdir(parents=True)
    path.write_text('{\n  // mine\n  "theme": "One"\n}\n')
    ended = mlxcel("connect", "zed", "--server", address, "--write", "--yes")
    assert ended.code == 1
    assert "is left as it is" in ended.err
    assert "hint: mlxcel connect zed prints what to add by hand" in ended.err
    assert path.read_text() == '{\n  // mine\n  "theme": "One"\n}\n'


def test_nothing_is_written_unasked(mlxcel: Mlxcel, address: str, home: Path) -> None:
    ended = mlxcel("connect", "aider", "--server", address, "--write")
    assert ended.code == 2
    assert "--yes says that it may" in ended.err
    assert not (home / ".aider.conf.yml").exists()


def test_another_file_can_be_named(mlxcel: Mlxcel, address: str, home: Path) -> None:
    assert mlxcel("connect", "aider", "--server", address, "--write", "--yes", "--file", "it.yml").code == 0
    assert yaml.safe_load((home / "it.yml").read_text())["model"] == "openai/double"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "no client is known as nobody"),
        (["codx"], "did you mean codex?"),
        (["cline", "--write"], "there is no file to write for Cline"),
        (["aider", "--yes"], "--file and --yes are for --write"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(mlxcel: Mlxcel, arguments: list[str], said: str) -> None:
    ended = mlxcel("connect", *arguments)
    assert ended.code == 2
    assert said in ended.err


def test_a_model_that_is_not_served_is_refused(mlxcel: Mlxcel, address: str) -> None:
    ended = mlxcel("connect", "curl", "--server", address, "-m", "other")
    assert ended.code == 1
    assert "has no model other" in ended.err
    assert "it has double" in ended.err


def test_no_server_is_an_error_with_a_hint(mlxcel: Mlxcel) -> None:
    ended = mlxcel("connect", "curl", "--server", "http://127.0.0.1:1")
    assert ended.code == 1
    assert "hint: is `mlxcel serve` running there?" in ended.err


def test_the_printed_command_of_curl_is_one_that_a_shell_reads(mlxcel: Mlxcel, address: str, home: Path) -> None:
    ended = mlxcel("connect", "curl", "--server", address)
    script = "curl() { printf '%s\\n' \"$@\"; }\n" + ended.out
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[:2] == [f"{address}/v1/chat/completions", "--json"]
    assert json.loads(said[2])["model"] == "double"


def test_a_file_that_no_text_can_be_written_to_is_left_and_nothing_beside_it(
    mlxcel: Mlxcel, address: str, home: Path
) -> None:
    path = home / ".claude/settings.json"
    path.parent.mkdir()
    before = r'{"theme": "\ud800"}'
    path.write_text(before)
    ended = mlxcel("connect", "claude", "--server", address, "--write", "--yes")
    assert ended.code == 1
    assert "is left as it is: it holds half of a surrogate pair" in ended.err
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [(path.name, before)]


def test_a_file_keeps_its_line_ends(mlxcel: Mlxcel, address: str, home: Path) -> None:
    path = home / ".aider.conf.yml"
    path.write_bytes(b"# mine\r\ndark-mode: true\r\n")
    ended = mlxcel("connect", "aider", "--server", address, "--write", "--yes")
    assert ended.code == 0, ended.err
    written = path.read_bytes()
    assert written.startswith(b"# mine\r\ndark-mode: true\r\n")
    assert written.count(b"\n") == written.count(b"\r\n") == 4


@pytest.mark.parametrize("kind", ["loop", "fifo", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(mlxcel: Mlxcel, address: str, home: Path, kind: str) -> None:
    path = home / ".aider.conf.yml"
    match kind:
        case "loop":
            path.symlink_to(path)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
    ended = mlxcel("connect", "aider", "--server", address, "--write", "--yes")
    assert ended.code == 1
    assert "is no file" in ended.err or "cannot be read" in ended.err
    assert str(path) in ended.err
    assert "hint: mlxcel connect aider prints what to add by hand" in ended.err
    assert [entry for entry in home.iterdir() if entry.name.startswith(".aider")] == [path]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"id": "a\x1b[2Jb"}, "whose name cannot be written"),
        ({"id": "\ud800"}, "whose name cannot be written"),
        ({"id": 3}, "lists no models"),
        (None, "lists no models"),
    ],
    ids=str,
)
def test_a_model_without_a_name_to_write_is_refused(
    mlxcel: Mlxcel, address: str, double: Double, entry: object, said: str
) -> None:
    double.listed = [entry]
    ended = mlxcel("connect", "codex", "--server", address)
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
    assert "\x1b" not in ended.err


@pytest.mark.parametrize("context", [{"meta": []}, {"max_model_len": "long"}, {"meta": {"n_ctx": -1}}], ids=str)
def test_a_context_that_is_no_length_is_as_if_not_said(
    mlxcel: Mlxcel, address: str, double: Double, context: dict[str, object]
) -> None:
    double.listed = [{"id": "double", **context}]
    ended = mlxcel("connect", "codex", "--server", address)
    assert ended.code == 0, ended.err
    assert "model_context_window" not in ended.out


def test_a_change_while_the_question_is_open_is_not_lost(
    mlxcel: Mlxcel, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / ".aider.conf.yml"
    path.write_text("dark-mode: true\n")

    def confirmed(_: str) -> bool:
        path.write_text("dark-mode: false\n")
        return True

    monkeypatch.setattr(render, "confirmed", confirmed)
    monkeypatch.setattr(render, "is_terminal", lambda _: True)
    ended = mlxcel("connect", "aider", "--server", address, "--write")
    assert ended.code == 1
    assert f"{path} was changed meanwhile: nothing is written" in ended.err
    assert [(file.name, file.read_text()) for file in home.glob(".aider*")] == [(path.name, "dark-mode: false\n")]


def test_a_file_that_may_only_be_read_is_refused(mlxcel: Mlxcel, address: str, home: Path) -> None:
    path = home / ".aider.conf.yml"
    path.write_text("dark-mode: true\n")
    path.chmod(0o444)
    ended = mlxcel("connect", "aider", "--server", address, "--write", "--yes")
    assert ended.code == 1
    assert f"{path} may only be read" in ended.err
    assert path.read_text() == "dark-mode: true\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [("file/x", "cannot be written"), ("n" * 300, "File name too long"), ("/dev/null/x", "written")],
)
def test_a_place_where_no_file_can_be_is_named(
    name: str, said: str, mlxcel: Mlxcel, address: str, home: Path
) -> None:
    (home / "file").write_text("")
    ended = mlxcel("connect", "aider", "--server", address, "--write", "--yes", "--file", name)
    assert ended.code == 1
    assert f"error: {name} cannot be " in ended.err
    assert said in ended.err
    assert "Errno" not in ended.err
