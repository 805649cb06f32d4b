"""Adapters by HTTP: chosen by the model's name, listed, mounted below a folder and nowhere else, taken away."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.load import load
from engine.size import Bound
from server.app import make_app
from server.config import ServerConfig
from tests.adapters import write_adapter
from tests.serving import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Served, live, served
from tests.several import Loads, held, several, text, wishing, write_several
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.anyio

BODY = {"prompt": "to be or not", "max_tokens": 8, "temperature": 1.0, "seed": 7, "ignore_eos": True}
TURN = {"messages": [{"role": "user", "content": "to be or not"}], "max_tokens": 8, "temperature": 0}
ADAPTERS = "/v1/adapters"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "base", "llama")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """The server's folder of adapters: two that fit and one that does not."""
    model = load(checkpoint).model
    root = tmp_path / "adapters"
    for seed, name in enumerate(("red", "blue"), start=1):
        write_adapter(root / name, model, seed=seed, rank=3 + seed)
    other = write_checkpoint(tmp_path / "other", "llama", hidden_size=64)
    write_adapter(root / "foreign", load(other).model)
    return root


async def answered(service: Served, model: str, **more: Any) -> str:
    answer = await service.answer(COMPLETIONS, {**BODY, "model": model, **more})
    assert answer["model"] == (model if ":" in model or model == "tiny" else f"tiny:{model}")
    said: str = answer["choices"][0]["text"]
    return said


async def mount(service: Served, name: str, path: str, **more: Any) -> httpx2.Response:
    return await service.post(ADAPTERS, {"name": name, "path": path, **more})


async def warmed_up(service: Served, one: Any) -> None:
    while one.conversations.tasks:
        await asyncio.wait(one.conversations.tasks)
    await service.warmed_up()


def error_of(response: httpx2.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


async def test_the_models_name_chooses(checkpoint: Path, folder: Path) -> None:
    """All dialects, together with the base; each answers as it does alone."""
    given = (f"red={folder / 'red'}", str(folder / "blue"))
    async with served(checkpoint, adapters=given, parallel=4) as service:
        names = ("tiny", "tiny:red", "tiny:blue")
        alone = [await answered(service, name) for name in names]
        assert len(set(alone)) == 3
        assert await asyncio.gather(*(answered(service, name) for name in names)) == alone
        assert await answered(service, "red") == alone[1]
        assert await answered(service, "tiny:blue", cache_prompt=False) == alone[2]
        streamed = await service.stream(COMPLETIONS, {**BODY, "model": "blue"})
        assert streamed.text() == alone[2]
        assert {chunk["model"] for chunk in streamed.chunks} == {"tiny:blue"}
        native = await service.answer("/completion", {**BODY, "n_predict": 8, "model": "tiny:red"})
        assert (native["content"], native["model"]) == (alone[1], "tiny:red")
        for path, body in ((CHAT, TURN), (MESSAGES, TURN), (RESPONSES, {"input": "to be or not"})):
            answers = [await service.answer(path, {**body, "model": name}) for name in names]
            assert [answer["model"] for answer in answers] == list(names)


async def test_embeddings_are_those_of_the_adapter(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint, adapters=(f"red={folder / 'red'}",)) as service:
        body = {"input": ["to be", "or not to be"]}
        plain, red = [await service.answer("/v1/embeddings", body | {"model": name}) for name in ("tiny", "red")]
        assert red["model"] == "tiny:red"
        assert [one["embedding"] for one in red["data"]] != [one["embedding"] for one in plain["data"]]
        again = await asyncio.gather(
            *(service.answer("/v1/embeddings", body | {"model": n}) for n in ("tiny", "red"))
        )
        assert [one["data"] for one in again] == [plain["data"], red["data"]]


async def test_clients_of_openai_and_anthropic(checkpoint: Path, folder: Path) -> None:
    with live(checkpoint, adapters=(f"red={folder / 'red'}",)) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        async with client:
            listed = [(model.id, (model.model_extra or {}).get("parent")) async for model in client.models.list()]
            assert listed == [("tiny", None), ("tiny:red", "tiny")]
            assert (await client.models.retrieve("tiny:red")).id == "tiny:red"
            answer = await client.completions.create(model="tiny:red", prompt="to be", max_tokens=4)
            assert answer.model == "tiny:red"
            with pytest.raises(openai.NotFoundError, match="served: tiny, tiny:red") as caught:
                await client.completions.create(model="tiny:green", prompt="to be", max_tokens=4)
            assert caught.value.code == "model_not_found"
        other = anthropic.AsyncAnthropic(base_url=server.address, api_key="none", max_retries=0)
        async with other:
            said = await other.messages.create(
                model="tiny:red", max_tokens=4, messages=[{"role": "user", "content": "to be"}]
            )
            assert said.model == "tiny:red"


async def test_mounted_and_unmounted_while_served(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint, server={"adapter_dir": folder}) as service:
        base = await answered(service, "tiny")
        assert (await service.client.get(ADAPTERS)).json() == {"object": "list", "data": []}
        mounted = await mount(service, "a", "red")
        assert mounted.status_code == 200, mounted.text
        said = mounted.json()
        assert {name: said[name] for name in ("id", "object", "name", "parent", "rank")} == {
            "id": "tiny:a", "object": "adapter", "name": "a", "parent": "tiny", "rank": 4,
        }  # fmt: skip
        assert said["bytes"] > 0
        assert (await service.client.get(ADAPTERS)).json()["data"] == [said]
        red = await answered(service, "tiny:a")
        assert red != base
        status, code, message = error_of(await mount(service, "a", "blue"))
        assert (status, code) == (409, "adapter_taken")
        assert "mounted already" in message
        gone = await service.client.delete(f"{ADAPTERS}/a")
        assert gone.json() == {"id": "tiny:a", "object": "adapter", "deleted": True}
        assert error_of(await service.post(COMPLETIONS, {**BODY, "model": "tiny:a"}))[0] == 404
        assert error_of(await service.client.delete(f"{ADAPTERS}/a"))[:2] == (404, "model_not_found")
        assert error_of(await service.client.delete(f"{ADAPTERS}/tiny"))[:2] == (404, "model_not_found")
        await mount(service, "a", str(folder / "blue"))  # the same name with other weights, the prompt still kept
        blue = await answered(service, "tiny:a")
        assert blue not in (red, base)
        assert blue == await answered(service, "tiny:a", cache_prompt=False)
        assert await answered(service, "tiny") == base
        assert (await service.client.delete(f"{ADAPTERS}/tiny:a")).status_code == 200


async def test_one_that_runs_ends_whole_when_its_adapter_is_taken_away(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint, adapters=(f"red={folder / 'red'}",)) as service:
        expected = await answered(service, "tiny:red")
        service.gate.shut()
        running = asyncio.ensure_future(answered(service, "tiny:red", cache_prompt=False))
        await service.gate.engine_held()
        removing = asyncio.ensure_future(service.client.delete(f"{ADAPTERS}/red"))
        while service.app.state.service.models.default.adapted:
            await asyncio.sleep(0)
        assert error_of(await service.post(COMPLETIONS, {**BODY, "model": "tiny:red"}))[0] == 404
        service.gate.open()
        assert (await removing).status_code == 200
        assert await running == expected
        await answered(service, "tiny")
        assert service.engine.adapters.num_leaving == 0


@pytest.mark.parametrize(
    "path",
    [
        "",
        "..",
        ".",
        "../adapters/red",
        "/etc",
        "red/../..",
        "nowhere",
        "out",
        "in",
        "red/adapter_config.json",
        "a\0b",
    ],
)
async def test_nothing_is_mounted_from_elsewhere(
    checkpoint: Path, folder: Path, tmp_path: Path, path: str
) -> None:
    """Neither by a path that leads out, nor by a link, nor by a file in a folder that is one."""
    outside = write_adapter(tmp_path / "outside", load(checkpoint).model)
    (folder / "out").symlink_to(outside)
    (folder / "in").mkdir()
    (folder / "in" / "adapter_config.json").write_bytes((outside / "adapter_config.json").read_bytes())
    os.symlink(outside / "adapters.safetensors", folder / "in" / "adapters.safetensors")
    async with served(checkpoint, server={"adapter_dir": folder}) as service:
        refused = await mount(service, "a", path)
        if path == "../adapters/red":  # it leads back
            assert refused.status_code == 200
            return
        assert refused.status_code == 400, refused.text
        assert str(tmp_path) not in refused.text
        assert (await service.client.get(ADAPTERS)).json()["data"] == []


async def test_refusals(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint) as service:
        status, code, message = error_of(await mount(service, "a", "red"))
        assert (status, code) == (400, "adapter_refused")
        assert "--adapter-dir" in message
    async with served(checkpoint, server={"adapter_dir": folder}) as service:
        base = await answered(service, "tiny")
        assert "must be [" in error_of(await mount(service, "a", "foreign"))[2]
        assert "cannot be an adapter's name" in error_of(await mount(service, "a:b", "red"))[2]
        assert error_of(await mount(service, "a", "red", model="other"))[:2] == (404, "model_not_found")
        assert error_of(await service.post(ADAPTERS, {"name": "a"}))[0] == 400
        assert "unknown field" in error_of(await mount(service, "a", "red", scale=2))[2]
        assert await answered(service, "tiny") == base


async def test_keys_are_asked_for(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint, server={"adapter_dir": folder, "api_key": ("secret",)}) as service:
        assert (await mount(service, "a", "red")).status_code == 401
        assert (await service.client.get(ADAPTERS)).status_code == 401
        assert (await service.client.delete(f"{ADAPTERS}/a")).status_code == 401


async def test_a_next_turn_is_prepared_with_its_adapter(checkpoint: Path, folder: Path) -> None:
    given = (f"red={folder / 'red'}",)
    async with served(checkpoint, adapters=given, no_warmup_next_turn=False) as service:
        models = service.app.state.service.models
        answer = await service.answer(CHAT, {**TURN, "model": "tiny:red", "seed": 1})
        await warmed_up(service, models.find("tiny:red"))
        assert {row.request.adapter for row in service.engine.rows} == {"red"}
        said = answer["choices"][0]["message"]["content"]
        turns = [*TURN["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        cached = []
        for name in ("tiny:red", "tiny"):
            answer = await service.answer(CHAT, {**TURN, "messages": turns, "model": name})
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            await warmed_up(service, models.find(name))
        assert cached[0] >= 16
        assert cached[1] == 0


async def test_it_is_there_again_when_its_model_is_loaded_again(tmp_path: Path) -> None:
    folders = write_several(tmp_path / "models")
    model = load(folders["window"]).model
    root = tmp_path / "adapters"
    write_adapter(root / "red", model)
    loads = Loads()
    async with several(folders, loads, models_max=1, adapter_dir=root) as service:
        mounted = await mount(service, "red", "red", model="window")
        assert mounted.json()["id"] == "window:red", mounted.text
        expected = await text(service, "window:red")
        assert expected != await text(service, "window")
        await text(service, "tiny")
        assert [entry["id"] for entry in (await service.client.get(ADAPTERS)).json()["data"]] == ["window:red"]
        assert await text(service, "window:red") == expected
        assert loads.opened[-3:] == ["window", "tiny", "window"]
        await text(service, "tiny")
        assert (await service.client.delete(f"{ADAPTERS}/red")).status_code == 200
        assert loads.opened[-1] == "tiny"
        assert error_of(await service.post(COMPLETIONS, {**BODY, "model": "window:red"}))[0] == 404
        await text(service, "window")


def with_red(tmp_path: Path) -> tuple[dict[str, Path], Path]:
    """Checkpoints of several models, and a folder of adapters with a red and a blue one for two of them."""
    folders = write_several(tmp_path / "models")
    root = tmp_path / "adapters"
    for seed, name in enumerate(("red", "blue"), start=1):
        write_adapter(root / name, load(folders["window"]).model, seed=seed)
    write_adapter(root / "tiny", load(folders["tiny"]).model)
    return folders, root


async def taken_away_while_it_runs(service: Served, loads: Loads) -> list[asyncio.Task[Any]]:
    """Mount red, hold its model in a request, let another model's wait, and take red away: the three requests."""
    assert (await mount(service, "red", "red", model="window")).status_code == 200
    gate = loads.gates["window"]
    gate.shut()
    running = asyncio.create_task(text(service, "window"))
    await gate.engine_held()
    waiting = asyncio.create_task(text(service, "tiny"))
    await wishing(service, 1)
    removing = asyncio.create_task(service.client.delete(f"{ADAPTERS}/red"))
    while service.app.state.service.models.find("window").adapted:
        await asyncio.sleep(0)
    return [running, waiting, removing]


async def test_taking_away_is_refused_by_no_queue(tmp_path: Path) -> None:
    folders, root = with_red(tmp_path)
    loads = Loads()
    async with several(
        folders, loads, models_max=1, adapter_dir=root, engine={"max_queue_depth": 1, "parallel": 1}
    ) as service:
        running, waiting, removing = await taken_away_while_it_runs(service, loads)
        loads.gates["window"].open()
        assert (await removing).status_code == 200
        await asyncio.gather(running, waiting)


async def test_taking_away_goes_on_when_its_client_has_left(tmp_path: Path) -> None:
    folders, root = with_red(tmp_path)
    loads = Loads()
    async with several(folders, loads, models_max=1, adapter_dir=root) as service:
        running, waiting, removing = await taken_away_while_it_runs(service, loads)
        for left in (removing, waiting):
            left.cancel()
            await asyncio.wait([left])
        loads.gates["window"].open()
        await running
        await service.exchanges_ended()
        again = await mount(service, "red", "blue", model="window")
        assert again.status_code == 200, again.text
        assert loads.opened == ["window"]


async def test_one_that_is_taken_away_during_the_load_is_not_there_after_it(tmp_path: Path) -> None:
    folders, root = with_red(tmp_path)
    loads = Loads()
    async with several(folders, loads, models_max=1, models_memory=Bound("none"), adapter_dir=root) as service:
        assert (await mount(service, "red", "red", model="window")).status_code == 200
        await text(service, "tiny")
        with held(loads):
            coming = asyncio.ensure_future(text(service, "window"))
            await loads.has_begun()
            assert (await service.client.delete(f"{ADAPTERS}/red")).status_code == 200
            assert (await service.client.get(ADAPTERS)).json()["data"] == []
        await coming
        assert await service.app.state.service.models.find("window").bridge.mounted() == {}
        assert (await mount(service, "red", "blue", model="window")).status_code == 200


async def test_a_model_is_loaded_again_without_an_adapter_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders, root = with_red(tmp_path)
    async with several(folders, models_max=1, models_memory=Bound("none"), adapter_dir=root) as service:
        for name in ("red", "blue"):
            assert (await mount(service, name, name, model="window")).status_code == 200
        expected = [await text(service, name) for name in ("window", "window:blue")]
        await text(service, "tiny")
        shutil.rmtree(root / "red")
        assert [await text(service, name) for name in ("window", "window:blue")] == expected
        for _ in range(2):
            status, code, message = error_of(await service.post(COMPLETIONS, {**BODY, "model": "window:red"}))
            assert (status, code) == (404, "model_not_found")
            assert "adapter_config.json is missing" in message
        red, blue = (await service.client.get(ADAPTERS)).json()["data"]
        assert (red["id"], "rank" in red, "error" in blue) == ("window:red", False, False)
        assert "adapter_config.json is missing" in red["error"]
        assert sum("without the adapter red" in record.message for record in caplog.records) == 1
        assert error_of(await mount(service, "red", "blue", model="window"))[:2] == (409, "adapter_taken")
        assert (await service.client.delete(f"{ADAPTERS}/red")).status_code == 200
        assert (await mount(service, "red", "blue", model="window")).status_code == 200
        assert await text(service, "window:red") == expected[1]


async def test_an_adapter_that_several_models_have_is_named_with_its_model(tmp_path: Path) -> None:
    folders, root = with_red(tmp_path)
    async with several(folders, adapter_dir=root) as service:
        for model, path in (("window", "red"), ("tiny", "tiny")):
            assert (await mount(service, "red", path, model=model)).status_code == 200
        asked = (
            await service.client.delete(f"{ADAPTERS}/red"),
            await service.post(COMPLETIONS, {**BODY, "model": "red"}),
        )
        for status, code, message in map(error_of, asked):
            assert (status, code) == (404, "model_not_found")
            assert "several models have an adapter red" in message
            assert "tiny:red, window:red" in message
            assert "not served" not in message
        assert (await service.client.delete(f"{ADAPTERS}/window:red")).status_code == 200
        assert (await service.client.delete(f"{ADAPTERS}/red")).json()["id"] == "tiny:red"


async def test_none_has_the_name_of_its_own_model(checkpoint: Path, folder: Path) -> None:
    async with served(checkpoint, alias="mine", server={"adapter_dir": folder}) as service:
        for name in ("tiny", "mine"):
            status, code, message = error_of(await mount(service, name, "red"))
            assert (status, code) == (400, "adapter_refused")
            assert "the model's own name" in message
    for name in ("tiny", "mine"):
        engine = EngineConfig(model=checkpoint, adapters=(f"{name}={folder / 'red'}",))
        with pytest.raises(ConfigError, match="the model's own name"):
            ServerConfig(engine, model_id="tiny", alias="mine")


DAMAGED = {
    "an endless rank": b'{"lora_parameters": {"scale": 1, "rank": 1' + b"0" * 400 + b"}}",
    "an endless scale": b'{"lora_parameters": {"rank": 4, "scale": 1' + b"0" * 400 + b"}}",
    "a number that is not read": b'{"lora_parameters": {"rank": 4, "scale": 1' + b"0" * 5000 + b"}}",
    "an endless alpha": b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1' + b"0" * 400 + b"}",
    "a deep kind": b'{"fine_tune_type": ' + b"[" * 900 + b"]" * 900 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
    "too deep": b"[" * 200_000,
    "no object": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("said", DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_configuration_is_refused(checkpoint: Path, folder: Path, said: bytes) -> None:
    (folder / "red" / "adapter_config.json").write_bytes(said)
    async with served(checkpoint, server={"adapter_dir": folder}) as service:
        status, code, message = error_of(await mount(service, "red", "red"))
        assert (status, code) == (400, "adapter_refused"), message


@pytest.mark.parametrize("several", [False, True])
def test_folders_that_are_not_there_are_refused_at_the_start(
    checkpoint: Path, tmp_path: Path, several: bool
) -> None:
    more: dict[str, Any] = {"models": ("other",), "others": (("other", checkpoint),)} if several else {}
    for name in ("nowhere", "x" * 300):
        missing = EngineConfig(model=checkpoint, adapters=(f"red={tmp_path / name}",))
        with pytest.raises(ConfigError, match=rf"adapters: there is no folder .*{name}") as caught:
            make_app(ServerConfig(missing, model_id="tiny", **more))
        assert caught.value.setting == "adapters"
    with pytest.raises(ConfigError, match=r"adapter_dir: there is no folder .*nowhere"):
        make_app(
            ServerConfig(EngineConfig(model=checkpoint), model_id="tiny", adapter_dir=tmp_path / "nowhere", **more)
        )


def test_nodes_and_talks_have_none(checkpoint: Path, folder: Path) -> None:
    given = EngineConfig(model=checkpoint, adapters=(f"red={folder / 'red'}",))
    for config in (
        {"engine": given, "node_role": "prefill", "serving_bind": "127.0.0.1:0"},
        {"engine": given, "node_role": "router", "decode_peers": ("127.0.0.1:1",)},
        {
            "engine": EngineConfig(model=checkpoint),
            "adapter_dir": folder,
            "node_role": "decode",
            "serving_bind": "127.0.0.1:0",
        },
    ):
        with pytest.raises(ConfigError, match="adapter"):
            ServerConfig(model_id="tiny", **config)  # type: ignore[arg-type]
