"""Case 106: a request for a model that is not served is a 404 that lists those that are."""

from pathlib import Path

import pytest

from tests.serving import CHAT, COMPLETIONS, served
from tests.several import Loads, several, write_several

pytestmark = pytest.mark.anyio

BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_unknown_names_are_refused_and_known_ones_answered(tiny: Path, path: str, streamed: bool) -> None:
    async with served(tiny, alias="mine") as service:
        body = BODIES[path] | {"max_tokens": 1, "stream": streamed}
        for name in ("gpt-4", "Tiny", "tiny ", "mine/tiny", "../tiny", "m"):
            response = await service.post(path, body | {"model": name})
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert repr(name) in error["message"]
            assert "mine" in error["message"]
            assert "tiny" in error["message"]
        assert service.engine.rows == []
        for named in ({"model": "tiny"}, {"model": "mine"}, {"model": ""}, {}):
            assert (await service.post(path, body | named)).status_code == 200


async def test_listings_know_the_same_names(tiny: Path) -> None:
    async with served(tiny, alias="mine") as service:
        listed = (await service.client.get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["mine"]
        for name in ("mine", "tiny"):
            assert (await service.client.get(f"/v1/models/{name}")).json()["id"] == "mine"
        response = await service.client.get("/v1/models/other/name")
        assert response.status_code == 404
        assert "'other/name'" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_of_several_models_all_are_listed_and_none_is_loaded(tmp_path: Path, path: str) -> None:
    loads = Loads()
    async with several(write_several(tmp_path), loads) as service:
        response = await service.post(path, BODIES[path] | {"model": "gpt-4"})
        assert response.status_code == 404
        assert "served: tiny, window, hybrid" in response.json()["error"]["message"]
        assert loads.opened == []
