"""Case 12c: a body that is not JSON is a 400, wherever it breaks off, and the server goes on."""

import json
from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, served

pytestmark = pytest.mark.anyio

BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hé\n"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hé\n", "max_tokens": 1},
    "/completion": {"prompt": "hé\n", "n_predict": 1},
    "/tokenize": {"content": "hé\n"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_cut_of_a_body_is_refused(tiny: Path, path: str) -> None:
    whole = json.dumps(BODIES[path], ensure_ascii=False).encode()
    async with served(tiny) as service:
        for cut in range(len(whole)):
            response = await service.client.post(path, content=whole[:cut])
            assert response.status_code == 400, whole[:cut]
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await service.client.post(path, content=whole)).status_code == 200


@pytest.mark.parametrize("body", [b"\xff\xfe", b"null", b"[]", b'"hi"', b"1", b"[" * 100_000, b'{"a":' * 100_000])
async def test_what_is_no_object_is_refused(tiny: Path, body: bytes) -> None:
    async with served(tiny) as service:
        response = await service.client.post(CHAT, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
