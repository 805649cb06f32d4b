"""A port that is free, taken or serving; proxies; and a hub that answers or does not."""

import socket
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants

from mlxcel_cli import config
from mlxcel_cli.doctor import network
from mlxcel_cli.doctor.finding import State
from tests.cli.double import Double


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def settings(port: int, host: str = "127.0.0.1") -> config.Settings:
    return config.Settings({"host": host, "port": port})


def test_a_free_port_is_ok():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (finding,) = network.look_at_port(settings(port))
    assert finding.state is State.OK


def test_a_port_that_serves_a_model_is_no_fault(address: str):
    (finding,) = network.look_at_port(settings(port_of(address)))
    assert finding.state is State.NOTE
    assert finding.said == f"double is served at 127.0.0.1:{port_of(address)}"


def test_a_port_that_another_program_holds_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (finding,) = network.look_at_port(settings(listener.getsockname()[1]))
    assert finding.state is State.BROKEN
    assert "--port 0" in finding.hint


def test_a_host_that_is_not_this_machine_is_broken():
    (finding,) = network.look_at_port(settings(1, "203.0.113.1"))
    assert finding.state is State.BROKEN


def test_a_socket_is_made_when_the_server_starts():
    (finding,) = network.look_at_port(settings(1, "/tmp/it.sock"))
    assert finding.state is State.OK


@pytest.mark.parametrize("host", ["a..b", "a..é", "a" * 300])
def test_a_host_that_is_no_name_is_broken(host: str):
    (finding,) = network.look_at_port(settings(1, host))
    assert (finding.state, finding.said) == (State.BROKEN, f"{host} is no name of a host")
    assert finding.hint


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/x.sock", "there is no folder"),
        ("file/x.sock", "there is no folder"),
        ("file.sock", "it exists and is not a socket"),
        ("a" * 200 + ".sock", "AF_UNIX path too long"),
    ],
)
def test_a_socket_that_cannot_be_made_is_broken(name: str, why: str, tmp_path: Path):
    for file in ("file", "file.sock"):
        (tmp_path / file).write_text("")
    (finding,) = network.look_at_port(settings(1, str(tmp_path / name)))
    assert finding.state is State.BROKEN
    assert why in finding.said


def test_a_socket_where_a_server_answers_is_noted_and_one_that_is_left_is_ok(tmp_path: Path):
    path = str(tmp_path / "it.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert [finding.state for finding in network.look_at_port(settings(1, path))] == [State.NOTE]
    assert [finding.state for finding in network.look_at_port(settings(1, path))] == [State.OK]


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({}, State.OK),
        ({"HTTPS_PROXY": "http://proxy:1"}, State.WARNING),
        ({"https_proxy": "http://proxy:1", "NO_PROXY": "localhost"}, State.WARNING),
        ({"http_proxy": "http://proxy:1", "no_proxy": "localhost, 127.0.0.1"}, State.OK),
        ({"ALL_PROXY": "http://proxy:1", "NO_PROXY": "*"}, State.OK),
    ],
    ids=str,
)
def test_proxies_that_would_take_this_machine_are_warned_of(environment, state):
    (finding,) = network.look_at_proxies(environment)
    assert finding.state is state
    assert bool(finding.hint) == (state is State.WARNING)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@proxy:1",
        "http://me:secret@at@proxy:1",
        "http://me:sec@ret://x@proxy:1",
        "me:secret@proxy:1",
        "socks5://secret@proxy:1",
    ],
)
def test_a_proxys_password_is_not_shown(url: str):
    finding, *_ = network.look_at_proxies({"HTTPS_PROXY": url})
    assert "secret" not in finding.said + finding.hint
    assert "ret:" not in finding.said
    assert "proxy:1" in finding.said or finding.state is State.BROKEN


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://secret@[::1",
        "http://me:secret",
        "http://proxy:99999",
        "foo://secret@proxy:1",
        "http://",
    ],
)
def test_what_is_no_url_of_a_proxy_is_broken_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch):
    (broken,) = network.look_at_proxies({"HTTPS_PROXY": url})
    assert (broken.state, broken.said) == (State.BROKEN, "HTTPS_PROXY is not the URL of a proxy")
    assert "http://HOST:PORT" in broken.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", url)
    (hub,) = network.look_at_hub()
    assert hub.state is State.WARNING
    assert "secret" not in hub.said + hub.hint


def test_a_password_in_what_the_hubs_client_says_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def fails(*args: object, **given: object) -> None:
        raise httpx2.ConnectError("no way through http://me:secret@proxy:1 today")

    monkeypatch.setattr(httpx2, "get", fails)
    (hub,) = network.look_at_hub()
    assert hub.said.endswith(": no way through http://***@proxy:1 today")
    assert "name a mirror with HF_ENDPOINT, or a proxy with HTTPS_PROXY" in hub.hint


def test_the_name_of_a_served_model_moves_no_cursor(address: str, double: Double):
    double.listed = [{"id": "a\x1b[2Jb"}]
    (finding,) = network.look_at_port(settings(port_of(address)))
    assert finding.said.startswith(r"a\x1b[2Jb is served at")


def test_a_hub_that_refuses_or_is_gone_is_warned_of(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    (finding,) = network.look_at_hub()
    assert (finding.state, finding.said) == (State.WARNING, f"{address}: it answered 404")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    (finding,) = network.look_at_hub()
    assert finding.state is State.WARNING


def test_a_hub_that_answers_is_ok(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"{address}/v1/models?")
    (finding,) = network.look_at_hub()
    assert finding.state is State.OK


def test_offline_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (finding,) = network.look_at_hub()
    assert finding.state is State.NOTE
