"""The OpenAPI document is valid, has every route, and has the fields that act: no more and no fewer."""

from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from engine.model.load import load
from server.app import ROUTES
from server.openapi import OPERATIONS, document
from server.validate import MEANINGLESS, neutral_of
from tests.adapters import write_adapter
from tests.serving import served

pytestmark = pytest.mark.anyio

BODIES = {path: operation.body for (_, path), operation in OPERATIONS.items() if operation.body is not None}


def properties_of(path: str) -> dict[str, Any]:
    told = document(needs_key=False)
    [content] = told["paths"][path]["post"]["requestBody"]["content"].values()
    schema = told["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert schema["additionalProperties"] is False
    properties: dict[str, Any] = schema["properties"]
    return properties


@pytest.mark.parametrize("needs_key", [True, False])
def test_it_is_valid(needs_key: bool) -> None:
    told = document(needs_key=needs_key)
    openapi_spec_validator.validate(told)
    assert ("security" in told) == needs_key


def test_it_has_every_route() -> None:
    routes = {(method, route.path.replace(":path", "")) for route in ROUTES for method in route.methods or ()}
    assert {route for route in routes if route[0] != "HEAD"} == OPERATIONS.keys()


async def test_it_is_served(tiny: Path) -> None:
    async with served(tiny) as service:
        assert (await service.client.get("/openapi.json")).json() == document(needs_key=False)


@pytest.mark.parametrize("path", BODIES)
def test_the_declared_fields_are_those_of_the_type_and_those_that_ask_for_nothing(path: str) -> None:
    body = BODIES[path]
    assert properties_of(path).keys() == {*body.__struct_fields__, *neutral_of(body), *MEANINGLESS}


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_declared_is_known_and_what_is_not_is_refused(tiny: Path, path: str) -> None:
    async with served(tiny) as service:
        for name in properties_of(path):
            response = await service.post(path, {name: {"qqq": []}, "undeclared": 1})
            error = response.json()["error"]
            assert response.status_code == 400
            assert f"unknown field {name!r}" not in error["message"]
        refused = await service.post(path, {"undeclared": 1})
        assert "unknown field 'undeclared'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_every_value_that_asks_for_nothing_is_accepted(tiny: Path, tmp_path: Path, path: str) -> None:
    least: dict[str, Any] = {"content": "a", "tokens": [1], "prompt": "a", "input": "a"}
    least |= {"name": "red", "path": write_adapter(tmp_path / "red", load(tiny).model).name}
    least["messages"] = [{"role": "user", "content": "a"}]
    properties = properties_of(path)
    body = {name: value for name, value in least.items() if name in properties}
    if OPERATIONS["POST", path].generates:
        body["max_tokens" if "max_tokens" in properties else "max_output_tokens"] = 1
    async with served(tiny, server={"adapter_dir": tmp_path}) as service:
        for name, values in neutral_of(BODIES[path]).items():
            if name in BODIES[path].__struct_fields__:
                continue
            assert properties[name]["enum"] == [*values, None]
            for value in values:
                response = await service.post(path, body | {name: value})
                assert response.status_code == 200, response.text
        nothing = {name: None for name in properties if name not in body}
        assert (await service.post(path, body | nothing)).status_code == 200
