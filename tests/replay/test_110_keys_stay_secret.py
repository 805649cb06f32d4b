"""Case 110: no key is logged, taken from the query or told by any route, whether it was right or wrong."""

import logging
from pathlib import Path

import pytest

from server.openapi import OPERATIONS
from tests.serving import live

KEY, WRONG = "sk-a-right-one", "sk-a-wrong-one"


def test_no_key_is_told(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with live(tiny, server={"api_key": (KEY,)}) as server, server.client() as client:
        for key in (KEY, WRONG):
            for (method, path), operation in OPERATIONS.items():
                if operation.endless and key == KEY:
                    continue
                asked = f"{path.replace('{id}', 'x')}?api_key={key}&key={key}"
                in_query = client.request(method, asked, json={})
                assert (in_query.status_code == 401) == (not path.startswith("/health"))
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    in_header = client.request(method, asked, json={"nonsense": 1}, headers=headers)
                    assert (in_header.status_code == 401) == (key == WRONG and not path.startswith("/health"))
                    assert "sk-a" not in in_header.text + in_query.text + str(in_header.headers)
    ours = [record for record in caplog.records if not record.name.startswith(("httpx2", "httpcore2"))]
    logged = repr([{**vars(record), "said": record.getMessage()} for record in ours])
    assert "invalid_api_key" in logged
    assert "sk-a" not in logged
