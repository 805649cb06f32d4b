"""Case 111: a page on the web drives nothing here: neither by its own origin nor by a name that points to here."""

from pathlib import Path

import pytest

from server.openapi import OPERATIONS
from tests.serving import served

pytestmark = pytest.mark.anyio

PAGES = {
    "another origin": {"origin": "https://evil.test"},
    "another origin, one port away": {"origin": "http://localhost:3000"},
    "an origin that is hidden": {"origin": "null"},
    "a name that points here": {"host": "evil.test"},
    "a name that points here, and its own page": {"host": "evil.test", "origin": "http://evil.test"},
    "a name that looks like this one": {"host": "localhost.evil.test"},
}


@pytest.mark.parametrize("page", PAGES)
async def test_every_route_refuses_a_foreign_page(tiny: Path, page: str) -> None:
    async with served(tiny) as service:
        for method, path in OPERATIONS:
            for asked in (method, "OPTIONS"):
                headers = PAGES[page] | {"access-control-request-method": method}
                response = await service.client.request(asked, path.replace("{id}", "tiny"), headers=headers)
                assert response.status_code == 403
                assert not any(name.startswith("access-control-") for name in response.headers)
        assert service.engine.rows == []


async def test_no_answer_says_that_pages_may_read_it(tiny: Path) -> None:
    async with served(tiny) as service:
        for (method, path), operation in OPERATIONS.items():
            if operation.endless:
                continue
            response = await service.client.request(method, path.replace("{id}", "tiny"), json={})
            assert response.status_code != 403
            assert "access-control-allow-origin" not in response.headers
