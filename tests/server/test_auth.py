"""Keys, origins and hosts: who is let in, and in which shape the others hear of it."""

import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.address import is_loopback
from server.auth import keys_of
from server.config import ServerConfig
from tests.serving import CHAT, COMPLETIONS, live, served

pytestmark = pytest.mark.anyio

KEYS = ("sk-first", "sk-second")
HI: dict[str, Any] = {"prompt": "hi", "max_tokens": 1}
EVIL = "https://evil.test"
CHAT_PAGE = "https://chat.example"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def configured(tmp_path: Path, **options: Any) -> ServerConfig:
    return ServerConfig(EngineConfig(model=tmp_path), "tiny", **options)


async def test_every_key_opens_and_nothing_else_does(tiny: Path) -> None:
    async with served(tiny, server={"api_key": KEYS}) as service:
        for key in KEYS:
            for headers in (bearer(key), {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
                assert (await service.post(COMPLETIONS, HI, headers=headers)).status_code == 200
        for headers in (
            {},
            bearer(""),
            bearer("sk-firs"),
            bearer("sk-first2"),
            bearer("sk-first, sk-second"),
            {"authorization": "sk-first"},
            {"authorization": "Basic sk-first"},
            {"x-api-key": ""},
            {"cookie": "key=sk-first"},
        ):
            for path in (f"{COMPLETIONS}?api_key=sk-first", "/v1/models", "/metrics", "/props", "/nowhere"):
                response = await service.client.get(path, headers=headers)
                assert response.status_code == 401, (headers, path)
                assert response.headers["www-authenticate"] == "Bearer"
        assert service.engine.rows[len(KEYS) * 3 :] == []


async def test_health_needs_no_key(tiny: Path) -> None:
    async with served(tiny, server={"api_key": KEYS}) as service:
        for path in ("/health", "/health/ready"):
            assert (await service.client.get(path)).status_code == 200


SHAPES: dict[str, dict[str, Any]] = {
    CHAT: {"error": {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}},
    "/v1/messages": {"type": "error", "error": {"type": "authentication_error"}},
    "/v1/messages/count_tokens": {"type": "error", "error": {"type": "authentication_error"}},
    "/completion": {"error": {"code": 401, "type": "authentication_error"}},
}


@pytest.mark.parametrize("path", SHAPES)
async def test_the_refusal_has_the_shape_of_its_dialect(tiny: Path, path: str) -> None:
    async with served(tiny, server={"api_key": KEYS}) as service:
        told = (await service.post(path, HI)).json()
        assert "API key" in told["error"].pop("message")
        assert told == SHAPES[path]


async def test_keys_come_from_a_file(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the house\nsk-first\n\n  sk-second \n")
    async with served(tiny, server={"api_key": ("sk-third",), "api_key_file": file}) as service:
        for key in (*KEYS, "sk-third"):
            assert (await service.client.get("/props", headers=bearer(key))).status_code == 200
        assert (await service.client.get("/props", headers=bearer("# of the house"))).status_code == 401


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "two words\n", "schlüssel\n"])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError):
        keys_of(configured(tmp_path, api_key_file=tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read"):
        keys_of(configured(tmp_path, api_key_file=tmp_path / "none"))


def test_keys_are_not_printed(tmp_path: Path) -> None:
    assert KEYS[0] not in repr(configured(tmp_path, api_key=KEYS))


async def test_a_refused_key_is_not_logged(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(tiny, server={"api_key": KEYS}) as service:
        for key in ("sk-wrong", KEYS[0]):
            await service.post(f"{COMPLETIONS}?key={key}", HI, headers=bearer(key))
    ours = [record for record in caplog.records if not record.name.startswith(("httpx2", "httpcore2"))]
    logged = repr([{**vars(record), "said": record.getMessage()} for record in ours])
    assert "invalid_api_key" in logged
    assert "sk-" not in logged


async def test_the_official_client_sends_its_key(tiny: Path) -> None:
    with live(tiny, server={"api_key": KEYS}) as server, server.client() as http:
        for key, error in ((KEYS[1], None), ("sk-wrong", openai.AuthenticationError)):
            client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, http_client=http, max_retries=0)
            if error is None:
                assert [model.id for model in client.models.list()] == ["tiny"]
                continue
            with pytest.raises(error) as refused:
                client.models.list()
            assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "headers", [{"origin": EVIL}, {"origin": "null"}, {"host": "evil.test"}, {"host": "a..b["}]
)
async def test_a_foreign_page_is_refused_on_every_route(tiny: Path, headers: dict[str, str]) -> None:
    async with served(tiny) as service:
        for method, path in (("POST", COMPLETIONS), ("POST", "/v1/cache/reset"), ("GET", "/v1/models")):
            response = await service.client.request(method, path, json=HI, headers=headers)
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "foreign_origin"
            assert not any(name.startswith("access-control") for name in response.headers)
        assert service.engine.rows == []


async def test_pages_of_the_host_itself_are_let_in(tiny: Path) -> None:
    async with served(tiny) as service:
        for host in ("localhost", "localhost:8080", "127.0.0.1:8080", "127.0.0.2", "[::1]:8080", "LOCALHOST"):
            for origin in ({}, {"origin": f"http://{host.lower()}"}):
                response = await service.client.get("/health", headers={"host": host, **origin})
                assert response.status_code == 200
        other_port = {"host": "localhost:8080", "origin": "http://localhost:3000"}
        assert (await service.client.get("/health", headers=other_port)).status_code == 403


async def test_no_header_opens_the_server_to_pages_by_default(tiny: Path) -> None:
    async with served(tiny) as service:
        asked = {"origin": EVIL, "access-control-request-method": "POST"}
        response = await service.client.request("OPTIONS", COMPLETIONS, headers=asked)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
        assert "access-control-allow-origin" not in (await service.post(COMPLETIONS, HI)).headers


async def test_a_page_that_is_named_may_ask_and_read(tiny: Path) -> None:
    async with served(tiny, server={"cors_origins": (CHAT_PAGE,), "api_key": KEYS}) as service:
        asked = {
            "origin": CHAT_PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        preflight = await service.client.request("OPTIONS", COMPLETIONS, headers=asked)
        assert preflight.status_code == 200
        deletes = asked | {"access-control-request-method": "DELETE"}
        assert (await service.client.request("OPTIONS", "/v1/adapters/a", headers=deletes)).status_code == 200
        assert preflight.headers["access-control-allow-origin"] == CHAT_PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = await service.post(COMPLETIONS, HI, headers={"origin": CHAT_PAGE, **bearer(KEYS[0])})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == CHAT_PAGE
        unknown = await service.post(COMPLETIONS, HI, headers={"origin": CHAT_PAGE})
        assert unknown.status_code == 401
        assert unknown.headers["access-control-allow-origin"] == CHAT_PAGE
        behind_a_proxy = {"host": "chat.example", **bearer(KEYS[0])}
        assert (await service.post(COMPLETIONS, HI, headers=behind_a_proxy)).status_code == 200
        assert (await service.post(COMPLETIONS, HI, headers={"origin": EVIL})).status_code == 403


async def test_all_pages_may_be_let_in_and_names_that_point_here_may_not(tiny: Path) -> None:
    async with served(tiny, server={"cors_origins": ("*",)}) as service:
        response = await service.post(COMPLETIONS, HI, headers={"origin": EVIL})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
        assert (await service.post(COMPLETIONS, HI, headers={"host": "evil.test"})).status_code == 403


async def test_a_refusal_carries_the_requests_id(tiny: Path) -> None:
    async with served(tiny, server={"api_key": KEYS}) as service:
        for headers, status in (({}, 401), ({"origin": EVIL}, 403)):
            response = await service.post(COMPLETIONS, HI, headers=headers | {"x-request-id": "mine"})
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


async def test_a_host_is_anybodys_beyond_loopback_and_an_origin_is_not(tiny: Path) -> None:
    async with served(tiny, server={"host": "0.0.0.0", "api_key": KEYS}) as service:
        headers = {"host": "box.lan:8080", **bearer(KEYS[0])}
        assert (await service.post(COMPLETIONS, HI, headers=headers)).status_code == 200
        assert (await service.post(COMPLETIONS, HI, headers=headers | {"origin": EVIL})).status_code == 403


def test_binds_beyond_loopback(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.test"):
        with pytest.raises(ConfigError, match="anybody on the network"):
            configured(tmp_path, host=host)
        for allowed in ({"api_key": KEYS}, {"api_key_file": tmp_path}, {"insecure_no_auth": True}):
            assert configured(tmp_path, host=host, **allowed).host == host
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost", "/run/m.sock"):
        assert configured(tmp_path, host=host).host == host


def test_what_is_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("", "localhost.evil.test", "127.0.0.1.evil.test", "10.0.0.1", "0.0.0.0")))


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://", "https://chat.example/", "https://Chat.example", ""]
)
def test_an_origin_that_no_browser_would_send_is_refused(tmp_path: Path, origin: str) -> None:
    with pytest.raises(ConfigError, match="no origin"):
        configured(tmp_path, cors_origins=(origin,))
