"""llama-server's `/props` and `/slots`: its shapes, our values, and nothing of what was said."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineStopped
from tests.serving import COMPLETIONS, PATIENCE_S, WatchedEngine, served, settle
from tests.tiny import TEMPLATE

pytestmark = pytest.mark.anyio

SECRET = "sesame"
BODY: dict[str, Any] = {
    "prompt": SECRET, "temperature": 0.5, "seed": 7, "top_k": 3, "max_tokens": 9, "stop": SECRET,
    "ignore_eos": True, "logit_bias": {"5": 1.5},
}  # fmt: skip


async def test_props_say_what_is_served(tiny: Path) -> None:
    async with served(tiny, alias="it", ctx_size=128, parallel=3, temp=0.25, n_predict=50) as service:
        props = (await service.client.get("/props")).json()
        assert props["total_slots"] == 3
        assert (props["model_alias"], props["model_path"]) == ("it", str(tiny))
        assert props["chat_template"] == TEMPLATE
        assert (props["bos_token"], props["eos_token"]) == ("", "<|im_end|>")
        assert props["build_info"].startswith("mlxcel-")
        settings = props["default_generation_settings"]
        assert settings["n_ctx"] == 128 // 3
        assert settings["params"]["temperature"] == 0.25
        assert settings["params"]["n_predict"] == 50
        assert settings["params"]["seed"] == -1


async def test_slots_are_free_at_first_and_in_the_end(tiny: Path) -> None:
    async with served(tiny, parallel=2, ctx_size=64) as service:
        free = [
            {"id": i, "id_task": -1, "n_ctx": 32, "speculative": False, "is_processing": False} for i in range(2)
        ]
        assert (await service.client.get("/slots")).json() == free
        await service.answer(COMPLETIONS, BODY)
        await asyncio.to_thread(settle, service.loop)
        assert (await service.client.get("/slots")).json() == free


async def test_a_slot_says_how_far_its_request_is(tiny: Path) -> None:
    async with served(tiny, parallel=2, prefill_chunk_size=4) as service:
        service.gate.shut()
        asked = asyncio.ensure_future(service.post(COMPLETIONS, BODY, headers={"x-request-id": "mine"}))
        for stored, decoded in ((0, 0), (4, 0), (6, 1), (6, 2)):
            await service.gate.engine_held()
            response = await service.client.get("/slots")
            assert SECRET not in response.text
            busy, free = response.json()
            assert (busy["is_processing"], free["is_processing"]) == (True, False)
            assert (busy["id"], busy["id_task"], busy["request_id"]) == (0, 0, "mine")
            assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_processed"]) == (6, stored)
            assert busy["next_token"] == [{"has_next_token": True, "n_remain": 9 - decoded, "n_decoded": decoded}]
            params = busy["params"]
            assert (params["temperature"], params["seed"], params["top_k"]) == (0.5, 7, 3)
            assert (params["n_predict"], params["ignore_eos"]) == (9, True)
            assert params["logit_bias"] == [{"token": 5, "bias": 1.5}]
            service.gate.let(1)
        service.gate.open()
        assert (await asked).status_code == 200


async def test_a_slot_says_what_it_took_from_the_prompt_cache(tiny: Path) -> None:
    async with served(tiny) as service:
        body = BODY | {"prompt": list(range(40))}
        await service.answer(COMPLETIONS, body)
        service.gate.shut()
        asked = asyncio.ensure_future(service.answer(COMPLETIONS, body))
        await service.gate.engine_held()
        service.gate.let(1)
        await service.gate.engine_held()
        busy = (await service.client.get("/slots")).json()[0]
        assert (busy["n_prompt_tokens_processed"], busy["n_prompt_tokens_cache"]) == (40, 32)
        service.gate.open()
        await asked


async def test_a_client_may_ask_for_an_error_where_no_slot_is_free(tiny: Path) -> None:
    async with served(tiny, parallel=1) as service:
        for query in ("", "?fail_on_no_slot=1"):
            assert (await service.client.get(f"/slots{query}")).status_code == 200
        service.gate.shut()
        asked = asyncio.ensure_future(service.answer(COMPLETIONS, BODY))
        await service.gate.engine_held()
        assert (await service.client.get("/slots?fail_on_no_slot=0")).status_code == 200
        refused = await service.client.get("/slots?fail_on_no_slot=1")
        error = {"code": 503, "message": "all slots are taken", "type": "unavailable_error"}
        assert (refused.status_code, refused.json()) == (503, {"error": error})
        service.gate.open()
        await asked


async def test_before_the_model_is_there(tiny: Path) -> None:
    loads = threading.Event()

    def open_engine(config: EngineConfig) -> WatchedEngine:
        assert loads.wait(PATIENCE_S)
        return WatchedEngine(config)

    async with served(tiny, open_engine=open_engine) as service:
        for path in ("/props", "/slots"):
            response = await service.client.get(path)
            error = {"code": 503, "message": "the model is being loaded", "type": "unavailable_error"}
            assert (response.status_code, response.json()) == (503, {"error": error})
            assert response.headers["retry-after"]
        assert (await service.client.get("/health/ready")).status_code == 503
        assert (await service.client.get("/metrics")).status_code == 200
        loads.set()
        await service.answer(COMPLETIONS, BODY)
        assert (await service.client.get("/health/ready")).status_code == 200


async def test_errors_have_llama_server_s_shape_on_its_routes_alone(tiny: Path) -> None:
    async with served(tiny) as service:
        for path in ("/props", "/slots"):
            response = await service.post(path, {})
            assert response.status_code == 405
            error = response.json()["error"]
            assert (error["code"], error["type"]) == (405, "invalid_request_error")
            assert error.keys() == {"code", "message", "type"}
        error = (await service.client.get("/nowhere")).json()["error"]
        assert error.keys() == {"code", "message", "type", "param"}


async def test_an_engine_that_is_gone_is_an_error_of_that_shape_too(tiny: Path) -> None:
    def refuse(config: EngineConfig) -> WatchedEngine:
        raise EngineStopped("made to fail")

    async with served(tiny, open_engine=refuse) as service:
        with pytest.raises(EngineStopped):
            await service.app.state.service.models.default.bridge.model()
        error = {"code": 503, "message": "made to fail", "type": "unavailable_error"}
        assert (await service.client.get("/slots")).json() == {"error": error}
