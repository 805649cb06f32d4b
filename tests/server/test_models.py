"""Several models in one server: each request has its own model's answer, whatever has to be loaded for it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.size import Bound, Size
from server.app import make_app
from server.config import ServerConfig
from tests.serving import CHAT, COMPLETIONS, PATIENCE_S
from tests.several import BODY, NAMES, Loads, alone, held, several, text, wishing, write_several

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_several(tmp_path_factory.mktemp("several"))


async def test_each_answers_as_it_does_alone(folders: dict[str, Path]) -> None:
    expected, loads = await alone(folders), Loads()
    async with several(folders, loads) as service:
        for name in (*NAMES, *NAMES):
            assert await text(service, name) == expected[name]
            assert len(loads.live) <= 2
    assert loads.opened == ["tiny", "window", "hybrid", "tiny", "window", "hybrid"]
    assert len(loads.threads) == 1
    assert loads.live == set()


async def test_two_at_once_have_one_load(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads) as service:
        with held(loads):
            asked = [asyncio.ensure_future(text(service, "window")) for _ in range(2)]
            await loads.has_begun()
        assert len({await one for one in asked}) == 1
        assert loads.opened == ["window"]


async def test_a_load_waits_for_those_that_run_and_they_end_whole(folders: dict[str, Path]) -> None:
    expected, loads = await alone(folders), Loads()
    async with several(folders, loads, models_max=1) as service:
        await text(service, "tiny")
        loads.gates["tiny"].shut()
        running = asyncio.ensure_future(text(service, "tiny"))
        await loads.gates["tiny"].engine_held()
        waiting = []
        for name in ("hybrid", "tiny"):
            waiting.append(asyncio.ensure_future(text(service, name)))
            await wishing(service, len(waiting))
        loads.gates["tiny"].open()
        assert await running == expected["tiny"]
        assert [await one for one in waiting] == [expected["hybrid"], expected["tiny"]]
        assert loads.opened == ["tiny", "hybrid", "tiny"]


async def test_the_default_is_the_first_and_unknown_names_list_all(folders: dict[str, Path]) -> None:
    async with several(folders) as service:
        assert (await service.answer(COMPLETIONS, BODY))["model"] == "tiny"
        response = await service.post(COMPLETIONS, {**BODY, "model": "gpt-4"})
        assert response.status_code == 404
        assert "tiny, window, hybrid" in response.json()["error"]["message"]


async def test_the_listing_says_which_are_there(folders: dict[str, Path]) -> None:
    async with several(folders, models_pin=("window",)) as service:
        await text(service, "window")
        listed = (await service.client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == list(NAMES)
        states = {entry["id"]: entry["status"] for entry in listed}
        assert [states[name]["value"] for name in NAMES] == ["unloaded", "loaded", "unloaded"]
        assert states["window"]["pinned"]
        assert states["window"]["bytes"] > 0
        assert listed[1]["max_model_len"] == 4096
        assert "max_model_len" not in listed[0]
        assert (await service.client.get("/v1/models/hybrid")).json()["id"] == "hybrid"


async def test_what_is_pinned_is_there_from_the_start_and_stays(folders: dict[str, Path]) -> None:
    loads = Loads()
    with held(loads):
        async with several(folders, loads, models_pin=("hybrid",)) as service:
            await loads.has_begun()
            assert (await service.client.get("/health")).status_code == 503
            loads.may.set()
            for name in ("hybrid", "tiny", "window", "tiny", "hybrid"):
                await text(service, name)
            assert (await service.client.get("/health")).status_code == 200
            assert loads.opened == ["hybrid", "tiny", "window", "tiny"]


async def test_a_pin_that_cannot_be_loaded_ends_the_server(folders: dict[str, Path]) -> None:
    loads, faults = Loads(), []
    loads.fault = ModelError("its weights are gone")
    async with several(folders, loads, on_fault=faults.append, models_pin=("window",)):
        async with asyncio.timeout(PATIENCE_S):
            while not faults:
                await asyncio.sleep(0.001)
    assert [str(fault) for fault in faults] == ["its weights are gone"]


async def test_a_load_is_no_stall(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads) as service:
        await text(service, "tiny")
        service.app.state.service.models.find("tiny").bridge._loop.silent_s = lambda: 1000.0
        assert (await service.client.get("/health/ready")).status_code == 503
        with held(loads):
            asked = asyncio.ensure_future(text(service, "window"))
            await loads.has_begun()
            assert (await service.client.get("/health/ready")).status_code == 200
        await asked


async def test_idle_models_are_unloaded_after_their_time(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads, models_ttl=0.05) as service:
        await text(service, "tiny")
        places = service.app.state.service.models.places
        async with asyncio.timeout(PATIENCE_S):
            while places[0].state != "unloaded":
                await asyncio.sleep(0.01)
        assert loads.live == set()
        await text(service, "tiny")
        assert loads.opened == ["tiny", "tiny"]


async def test_a_model_that_cannot_be_loaded_is_no_fault_of_the_others(folders: dict[str, Path]) -> None:
    expected, loads, faults = await alone(folders), Loads(), []
    async with several(folders, loads) as service:
        service.app.state.service.models._on_fault = faults.append
        assert await text(service, "tiny") == expected["tiny"]
        loads.fault = ModelError("its weights are gone")
        asked = [service.post(COMPLETIONS, {**BODY, "model": "window"}) for _ in range(2)]
        for response in await asyncio.gather(*asked):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_not_loaded"
        assert await text(service, "tiny") == expected["tiny"]
        listed = (await service.client.get("/v1/models/window")).json()
        assert listed["status"]["error"] == "its weights are gone"
        loads.fault = None
        assert await text(service, "window") == expected["window"]
        assert faults == []


async def test_an_engine_that_breaks_ends_its_own_requests(folders: dict[str, Path], monkeypatch: Any) -> None:
    expected, loads = await alone(folders), Loads()
    async with several(folders, loads) as service:
        for name in ("tiny", "window"):
            await text(service, name)
        broken = service.app.state.service.models.find("window").bridge._loop._engine

        def run(tick: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(broken, "run", run)
        for _ in range(5):
            response = await service.post(COMPLETIONS, {**BODY, "model": "window"})
            assert response.status_code == 500
        assert await text(service, "tiny") == expected["tiny"]
        async with asyncio.timeout(PATIENCE_S):
            while "window" in loads.live:
                await asyncio.sleep(0.01)
        assert await text(service, "window") == expected["window"]
        assert (await service.client.get("/health")).status_code == 200


async def test_a_pinned_engine_that_breaks_is_loaded_again(folders: dict[str, Path], monkeypatch: Any) -> None:
    loads = Loads()
    async with several(folders, loads, models_pin=("window",)) as service:
        await text(service, "window")

        def run(tick: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(service.app.state.service.models.find("window").bridge._loop._engine, "run", run)
        for _ in range(5):
            assert (await service.post(COMPLETIONS, {**BODY, "model": "window"})).status_code == 500
        async with asyncio.timeout(PATIENCE_S):
            while loads.opened != ["window", "window"] or service.app.state.service.models.is_loading:
                await asyncio.sleep(0.001)
        assert (await service.client.get("/health")).status_code == 200


async def test_a_model_that_turns_out_too_large_is_refused_each_time(folders: dict[str, Path]) -> None:
    async with several(folders, models_memory=Bound("64MiB")) as service:
        place = service.app.state.service.models.places[1]
        service.app.state.service.models.find("window").bridge._on_loaded = lambda: None
        load = service.app.state.service.models._loaded

        def loaded() -> None:
            model = service.app.state.service.models.find("window").bridge._loop.model
            large = replace(model.storable, weight_bytes=60 << 20)
            service.app.state.service.models.find("window").bridge._loop.model = replace(model, storable=large)
            load(service.app.state.service.models.find("window"))

        service.app.state.service.models.find("window").bridge._on_loaded = loaded
        for _ in range(2):
            response = await service.post(COMPLETIONS, {**BODY, "model": "window"})
            assert response.status_code == 503
            assert "are there for it" in response.json()["error"]["message"]
        assert place.state == "unloaded"
        await text(service, "tiny")


async def test_budgets_are_for_all_models_together(folders: dict[str, Path]) -> None:
    budgets = {"kv_cache_budget": Bound("64MiB"), "prompt_cache_bytes": Size("8MiB")}
    async with several(folders, engine=budgets, models_max=2) as service:
        for name in NAMES:
            await text(service, name)
            props = (await service.client.get(f"/props?model={name}")).json()
            assert props["storable"]["budget_bytes"] == 32 << 20
            stats = (await service.client.get(f"/v1/cache/stats?model={name}")).json()
            assert stats["budget_bytes"] == 4 << 20


async def test_the_queue_is_bounded_over_all_models(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads, engine={"max_queue_depth": 2, "parallel": 1}) as service:
        with held(loads):
            asked = [asyncio.ensure_future(text(service, name)) for name in ("window", "hybrid")]
            await wishing(service, 2)
            refused = await service.post(COMPLETIONS, {**BODY, "model": "tiny"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "queue_full"
        for one in asked:
            await one
        samples = (await service.client.get("/metrics")).text
        assert 'mlxcel_requests_total{model="tiny",outcome="refused"} 1.0' in samples
        assert 'mlxcel_requests_total{model="window",outcome="length"} 1.0' in samples
        assert 'mlxcel_model_loads_total{model="hybrid"} 1.0' in samples


async def test_more_urgent_requests_are_loaded_for_first(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads, models_max=1) as service:
        with held(loads):
            first = asyncio.ensure_future(text(service, "tiny"))
            await loads.has_begun()
            late = []
            for name, priority in (("window", "normal"), ("hybrid", "high")):
                asked = service.post(COMPLETIONS, {**BODY, "model": name}, headers={"x-priority": priority})
                late.append(asyncio.ensure_future(asked))
            await wishing(service, 3)
        await first
        assert [(await one).status_code for one in late] == [200, 200]
        assert loads.opened == ["tiny", "hybrid", "window"]


async def test_token_routes_and_looks_name_a_model(folders: dict[str, Path]) -> None:
    async with several(folders) as service:
        for path, body in (
            ("/tokenize", {"content": "ab"}),
            ("/detokenize", {"tokens": [65]}),
            ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert (await service.post(path, {**body, "model": "window"})).status_code == 200
            assert (await service.post(path, {**body, "model": "other"})).status_code == 404
        count = {"messages": [{"role": "user", "content": "a"}], "model": "window"}
        assert (await service.post("/v1/messages/count_tokens", count)).status_code == 200
        for path in ("/props", "/slots", "/v1/cache/stats"):
            assert (await service.client.get(f"{path}?model=window")).status_code == 200
            assert (await service.client.get(f"{path}?model=other")).status_code == 404
            unloaded = await service.client.get(path)
            assert unloaded.status_code == 503
            assert "the model is unloaded" in unloaded.text
        assert (await service.client.get("/props?model=window")).json()["model_alias"] == "window"


async def test_a_chat_goes_on_where_its_model_was_away(folders: dict[str, Path]) -> None:
    async with several(folders, models_max=1) as service:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
        one = await service.answer(CHAT, {**body, "model": "tiny"})
        await text(service, "window")
        assert (await service.answer(CHAT, {**body, "model": "tiny"}))["choices"] == one["choices"]


async def test_stopping_ends_those_that_wait_for_a_load(folders: dict[str, Path]) -> None:
    loads = Loads()
    async with several(folders, loads) as service:
        with held(loads):
            asked = [
                asyncio.ensure_future(service.post(COMPLETIONS, {**BODY, "model": name}))
                for name in ("tiny", "window")
            ]
            await wishing(service, 2)
            service.app.state.service.models.end()
        for one in asked:
            response = await one
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_stopped"


def config(**more: Any) -> ServerConfig:
    options = {"models": ("b",), "others": (("b", Path("b")),), **more}
    return ServerConfig(EngineConfig(model=Path("a"), **options.pop("engine", {})), model_id="a", **options)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"others": (("a", Path("b")),)}, "a is named twice"),
        ({"models_pin": ("c",)}, "c is none of a, b"),
        ({"models_pin": ("a",), "models_max": 1}, "none is left"),
        ({"engine": {"adapter": Path("x")}}, "adapter is for one model"),
        ({"models_pin": ("a", "b"), "models_max": 1}, "are pinned"),
        ({"models": (), "others": (), "models_ttl": 5.0}, "models_ttl is for several models"),
        ({"node_role": "decode", "serving_bind": "127.0.0.1:0"}, "decode of several processes serves one model"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        config(**more)


@pytest.mark.parametrize("bound", ["0", "1MB"])
def test_memory_for_no_model_is_refused_at_the_start(folders: dict[str, Path], bound: str) -> None:
    (_, first), *others = folders.items()
    server = ServerConfig(
        EngineConfig(model=first),
        model_id="tiny",
        models=tuple(name for name, _ in others),
        others=tuple(others),
        models_memory=Bound(bound),
    )
    with pytest.raises(ConfigError, match="models_memory has room for no model"):
        make_app(server)
