"""Where the server listens, and with which code it ends."""

import socket
import stat
import threading
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServerConfig
from server.run import serve
from tests.serving import CHAT, live

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def config(checkpoint: Path, host: str, port: int = 0) -> ServerConfig:
    return ServerConfig(EngineConfig(model=checkpoint), "tiny", host=host, port=port)


def test_any_free_port(tiny: Path) -> None:
    with live(tiny) as server, server.client() as client:
        assert server.address.startswith("http://127.0.0.1:")
        assert not server.address.endswith(":0")
        assert client.post(CHAT, json=BODY).status_code == 200


def test_a_port_that_is_taken_is_refused(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve(config(tiny, "127.0.0.1", port))


@pytest.mark.parametrize("host", ["a..b", "a..é", "a" * 300])
def test_a_host_that_is_no_name_is_refused(host: str, tiny: Path) -> None:
    engine = EngineConfig(model=tiny)
    wanted = ServerConfig(engine, "tiny", host=host, port=0, insecure_no_auth=True)
    with pytest.raises(ConfigError, match=r"cannot listen on a.*:0: no such host is known"):
        serve(wanted)


def test_a_unix_socket_is_its_owners_and_goes_with_the_server(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with live(tiny, str(path)) as server, server.client() as client:
        assert server.address == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert client.post(CHAT, json=BODY).status_code == 200
    assert server.codes == [0]
    assert not path.exists()


def test_a_path_left_by_a_dead_server_is_taken_over(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with live(tiny, str(path)) as server, server.client() as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert client.post(CHAT, json=BODY).status_code == 200


def test_a_path_that_answers_is_refused_and_left_alone(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with live(tiny, str(path)) as server, server.client() as client:
        with pytest.raises(ConfigError, match="another server"):
            serve(config(tiny, str(path)))
        assert client.post(CHAT, json=BODY).status_code == 200


def test_a_path_that_is_no_socket_is_refused_and_left_alone(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        serve(config(tiny, str(path)))
    assert path.read_text() == "precious"


def test_a_path_in_no_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        serve(config(tiny, str(tmp_path / "none" / "m.sock")))


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    ready = threading.Event()
    assert serve(config(tmp_path / "nothing", "127.0.0.1"), lambda address: ready.set()) == 1
    assert ready.is_set()
