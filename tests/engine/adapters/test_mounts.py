"""Mounting: what fits is mounted, what does not leaves everything as it was, and what goes waits for its rows."""

import json
import queue
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from engine.adapters import mounts
from engine.adapters.layer import low_rank_of
from engine.config import EngineConfig, Ranks
from engine.engine import Engine
from engine.errors import AdapterError, AdapterNotFound, ConfigError, MlxcelError, ModelError
from engine.loop import EngineLoop
from engine.request import Output, Request
from tests.adapters import linear_layers, write_adapter
from tests.engines import Watched
from tests.tiny import write_checkpoint
from tests.zoo import zoo_loaded, zoo_model

PROMPT = tuple((7 * i + 3) % 250 for i in range(20))
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def watched() -> Watched:
    return Watched(zoo_loaded(zoo_model("llama")), mode="spans", parallel=2)


@pytest.fixture
def model(watched):
    return watched.engine.adapters.model


def request(adapter: str = "", num_new: int = 4) -> Request:
    return Request("r", PROMPT, max_tokens=num_new, ignore_eos=True, adapter=adapter)


def written(tmp_path: Path, model, name: str = "adapter", **how) -> Path:
    return write_adapter(tmp_path / name, model, **how)


def edited(folder: Path, **said) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    return folder


def reweighed(folder: Path, change, name: str = "adapters.safetensors") -> Path:
    arrays = {key: mx.array(array) for key, array in mx.load(str(folder / name)).items()}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / name), change(arrays))
    return folder


def without(part: str):
    return lambda arrays: {name: array for name, array in arrays.items() if not name.endswith(part)}


def with_one(name: str, array: mx.array):
    return lambda arrays: arrays | {name: array}


def test_what_is_mounted_is_said(watched, tmp_path, model) -> None:
    mounted = watched.engine.adapters.mount("a", written(tmp_path, model, rank=5))
    assert (mounted.name, mounted.rank, mounted.num_layers) == ("a", 5, len(linear_layers(model)))
    assert watched.engine.adapters.mounted == (mounted,)
    assert str(mounted).startswith(f"a ({mounted.num_layers} layers of rank 5, ")


# What is wrong with a folder, and what the refusal says of it.
FAULTS = {
    "no folder": (lambda folder: folder / "nowhere", "adapter_config.json is missing"),
    "no name of a folder": (lambda folder: folder / ("x" * 300), "adapter_config.json is missing"),
    "whole weights": (lambda folder: edited(folder, fine_tune_type="full"), "whole weights"),
    "another kind": (lambda folder: edited(folder, fine_tune_type="odd"), "'odd' weights"),
    "no parameters": (lambda folder: edited(folder, lora_parameters=None), "no lora_parameters"),
    "no scale": (lambda folder: edited(folder, lora_parameters={"rank": 4}), "scale is None"),
    "an endless scale": (
        lambda folder: edited(folder, lora_parameters={"rank": 4, "scale": float("inf")}),
        "scale is inf",
    ),
    "a scale beyond all": (
        lambda folder: edited(folder, lora_parameters={"rank": 4, "scale": 10**400}),
        "scale is 1000",
    ),
    "no rank": (lambda folder: edited(folder, lora_parameters={"rank": 0, "scale": 1}), "no rank"),
    "another rank": (
        lambda folder: edited(folder, lora_parameters={"rank": 3, "scale": 1}),
        "must be [3, 32]",
    ),
    "dora without magnitudes": (lambda folder: edited(folder, fine_tune_type="dora"), "no magnitudes"),
    "half a pair": (lambda folder: reweighed(folder, without(f"{Q_PROJ}.lora_b")), f"no {Q_PROJ}.lora_b"),
    "nothing": (lambda folder: reweighed(folder, lambda arrays: {}), "no weights"),
    "a stranger": (
        lambda folder: reweighed(folder, with_one("model.norm.weight", mx.ones(32))),
        "model.norm.weight",
    ),
    "a layer too many": (
        lambda folder: reweighed(
            folder,
            lambda arrays: {name.replace("layers.1.", "layers.7."): array for name, array in arrays.items()},
        ),
        "no such layer",
    ),
    "other sizes": (
        lambda folder: reweighed(folder, with_one(f"{Q_PROJ}.lora_b", mx.zeros((4, 8)))),
        "second factor is mlx.core.float32[8, 4]",
    ),
    "no numbers": (
        lambda folder: reweighed(folder, with_one(f"{Q_PROJ}.lora_b", mx.full((4, 32), mx.nan))),
        "are no numbers",
    ),
    "whole numbers": (
        lambda folder: reweighed(folder, with_one(f"{Q_PROJ}.lora_b", mx.zeros((4, 32), mx.int32))),
        "int32",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_leaves_everything_as_it_was(watched, tmp_path, model, spoil, said) -> None:
    adapters = watched.engine.adapters
    adapters.mount("good", written(tmp_path, model, "good"))
    before = [watched.alone(request(name)) for name in ("", "good")]
    kept = {name: low_rank_of(module) for name, module in model.named_modules()}
    with pytest.raises(AdapterError) as caught:
        adapters.mount("bad", spoil(written(tmp_path, model, "bad", seed=5)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {name: low_rank_of(module) for name, module in model.named_modules()} == kept
    assert [each.name for each in adapters.mounted] == ["good"]
    assert [watched.alone(request(name)) for name in ("", "good")] == before
    with pytest.raises(AdapterNotFound, match="mounted: good"):
        watched.engine.submit(request("bad"))


def test_damaged_files(watched, tmp_path, model) -> None:
    folder = written(tmp_path, model)
    weights = folder / "adapters.safetensors"
    whole = weights.read_bytes()
    for length in (0, 4, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(AdapterError, match="cannot be read"):
            watched.engine.adapters.mount("a", folder)
    weights.unlink()
    with pytest.raises(AdapterError, match=r"adapters\.safetensors is missing"):
        watched.engine.adapters.mount("a", folder)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(AdapterError, match="cannot be read"):
        watched.engine.adapters.mount("a", folder)


def test_a_model_that_may_miss_one_is_loaded_without_it(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "a", load_model(folder)[0])
    adapters = (f"a={adapter}", "b=/nowhere/at/all")
    engine = Engine.open(EngineConfig(model=folder, adapters=adapters, adapters_may_miss=True))
    assert [each.name for each in engine.adapters.mounted] == ["a"]
    with pytest.raises(AdapterNotFound, match=r"b could not be mounted: .* is missing"):
        engine.submit(request("b"))
    with pytest.raises(AdapterError, match="mounted already"):
        engine.adapters.mount("b", adapter)
    assert engine.adapters.unmount("b") is None
    assert engine.adapters.mount("b", adapter).number == 2


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias all"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_what_peft_can_do_and_nobody_here_is_refused_by_name(watched, tmp_path, model, said, named) -> None:
    with pytest.raises(AdapterError, match=named):
        watched.engine.adapters.mount("a", edited(written(tmp_path, model, peft=True), **said))


def test_rank_stabilized_scales(watched, tmp_path, model) -> None:
    plain = written(tmp_path, model, "plain", peft=True, rank=4, scale=2.0)
    stabilized = edited(written(tmp_path, model, "rs", peft=True, rank=4), use_rslora=True, lora_alpha=4.0)
    watched.engine.adapters.mount("plain", plain)
    watched.engine.adapters.mount("rs", stabilized)
    assert watched.alone(request("plain")) == watched.alone(request("rs"))


def test_names_that_are_the_ends_of_the_models(watched, tmp_path, model) -> None:
    """Other libraries leave out what a model of several parts has before its language model."""
    folder = reweighed(
        written(tmp_path, model, peft=True),
        lambda arrays: {
            name.replace("base_model.model.model.", "base_model.model."): a for name, a in arrays.items()
        },
        "adapter_model.safetensors",
    )
    assert watched.engine.adapters.mount("a", folder).num_layers == len(linear_layers(model))


def test_layers_that_no_row_can_have_for_itself(tmp_path) -> None:
    model = zoo_model("qwen3_moe")
    watched = Watched(zoo_loaded(model), mode="spans")
    folder = written(tmp_path, model, layers=[linear_layers(model)[0]])
    pair = {"lora_a": mx.zeros((32, 4)), "lora_b": mx.zeros((4, 32))}
    for layer, said in {
        "model.embed_tokens": "a layer of type Embedding",
        "lm_head": "the output head",
        "model.layers.0.mlp.switch_mlp.up_proj": "a layer of type SwitchLinear",
        "model.layers.0": "a layer of type",
    }.items():
        with_it = reweighed(folder, lambda arrays, at=layer: {f"{at}.{part}": a for part, a in pair.items()})
        with pytest.raises(AdapterError, match=said) as caught:
            watched.engine.adapters.mount("a", with_it)
        assert "--adapter" in caught.value.hint


def test_a_layer_that_is_not_called_is_refused(watched, tmp_path, model) -> None:
    """An adapter of it would do nothing, and nobody would know."""
    model.layers[0].unused = nn.Linear(32, 32)
    with pytest.raises(AdapterError, match=r"does not call .*unused"):
        watched.engine.adapters.mount("a", written(tmp_path, model))
    assert low_rank_of(model.layers[0].self_attn.q_proj) is None


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "..", ".a", "a b", "x" * 200, "ä"])
def test_names(watched, tmp_path, model, name) -> None:
    with pytest.raises(AdapterError, match="name"):
        watched.engine.adapters.mount(name, written(tmp_path, model))


def test_a_name_is_taken_until_it_is_given_up(watched, tmp_path, model) -> None:
    folder = written(tmp_path, model)
    watched.engine.adapters.mount("a", folder)
    with pytest.raises(AdapterError, match="mounted already"):
        watched.engine.adapters.mount("a", folder)
    watched.engine.adapters.unmount("a")
    with pytest.raises(AdapterNotFound, match="none"):
        watched.engine.adapters.unmount("a")
    assert watched.engine.adapters.mount("a", folder).number == 2


def test_there_may_be_so_many(watched, tmp_path, model, monkeypatch) -> None:
    monkeypatch.setattr(mounts, "MOST_ADAPTERS", 2)
    folder = written(tmp_path, model)
    for name in ("a", "b"):
        watched.engine.adapters.mount(name, folder)
    with pytest.raises(AdapterError, match="no more may be"):
        watched.engine.adapters.mount("c", folder)


def test_too_little_memory(watched, tmp_path, model, monkeypatch) -> None:
    monkeypatch.setattr(mounts, "available_bytes", lambda: 1000)
    with pytest.raises(AdapterError, match="1 kB of memory are free"):
        watched.engine.adapters.mount("a", written(tmp_path, model))


def test_what_is_mounted_later_takes_nothing_that_was_promised_to_rows(watched, tmp_path, model) -> None:
    adapters = watched.engine.adapters
    folders = [written(tmp_path, model, name, seed=seed) for seed, name in enumerate("ab")]
    one_bytes = adapters.mount("a", folders[0]).num_bytes
    adapters.leave_room(one_bytes - 1)
    with pytest.raises(AdapterError, match="beside what rows may take"):
        adapters.mount("b", folders[1])
    adapters.leave_room(one_bytes)
    adapters.mount("b", folders[1])


def test_what_goes_waits_for_its_rows(watched, tmp_path, model) -> None:
    """Rows that have it end as they would have; the others' slots move, and they do not notice."""
    adapters = watched.engine.adapters
    for seed, name in enumerate(("a", "b")):
        adapters.mount(name, written(tmp_path, model, name, seed=seed))
    expected = {name: watched.alone(request(name, 8)) for name in ("", "a", "b")}
    rows = {name: watched.engine.submit(request(name, 8)) for name in expected}
    for row in rows.values():
        watched.store(row, 100)
    watched.engine.step(rows.values())
    adapters.unmount("a")
    adapters.settle([row.adapter for row in rows.values()])
    assert adapters.num_leaving == 1
    with pytest.raises(AdapterNotFound):
        watched.engine.submit(request("a"))
    assert watched.finish(rows["a"]) == expected["a"]
    adapters.settle([rows["b"].adapter, 0])
    assert adapters.num_leaving == 0
    low_rank = low_rank_of(model.layers[0].self_attn.q_proj)
    assert len(low_rank.factors) == 2
    for name in ("", "b"):
        assert watched.finish(rows[name]) == expected[name]
    adapters.unmount("b")
    adapters.settle(())
    assert low_rank_of(model.layers[0].self_attn.q_proj) is None
    assert watched.alone(request(num_new=8)) == expected[""]


def test_nothing_of_a_failed_forward_stays(watched, tmp_path, model) -> None:
    watched.engine.adapters.mount("a", written(tmp_path, model))
    expected = [watched.alone(request(name)) for name in ("", "a")]
    choice = watched.engine._forward.choice
    row = watched.engine.submit(request("a"))
    call = type(model.layers[1].mlp).__call__

    def fail(self, x):
        raise RuntimeError("a broken layer")

    type(model.layers[1].mlp).__call__ = fail
    try:
        with pytest.raises(RuntimeError):
            watched.store(row, 100)
    finally:
        type(model.layers[1].mlp).__call__ = call
    assert (choice.one, choice.each) == (0, None)
    watched.engine.release(row)
    assert [watched.alone(request(name)) for name in ("", "a")] == expected


def test_settings(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "base", "llama")
    plain = Engine.open(EngineConfig(model=folder))
    adapter = write_adapter(tmp_path / "some-adapter", plain.adapters.model)
    config = EngineConfig(model=folder, adapters=(str(adapter), f"other={adapter}"))
    assert config.mounts == {"some-adapter": adapter, "other": adapter}
    engine = Engine.open(config)
    assert [each.name for each in engine.adapters.mounted] == ["some-adapter", "other"]
    assert any(note.startswith("adapter: other (") for note in engine.notes)
    assert engine.storable.weight_bytes == plain.storable.weight_bytes + engine.adapters.num_bytes
    for wrong in (("a=",), ("=x",), ("a:b=x",), ("a=x", "a=y"), ("",)):
        with pytest.raises(ConfigError, match="adapters"):
            EngineConfig(model=folder, adapters=wrong)
    with pytest.raises(ConfigError, match="beside a model as it is"):
        EngineConfig(model=folder, adapter=adapter, adapters=(f"a={adapter}",))
    with pytest.raises(ConfigError, match="several ranks"):
        EngineConfig(model=folder, ranks=Ranks(0, 2, "localhost"), adapters=(f"a={adapter}",))
    with pytest.raises(ModelError, match=r"adapter a: .*missing") as caught:
        Engine.open(EngineConfig(model=folder, adapters=("a=/nowhere/at/all",)))
    assert not isinstance(caught.value, AdapterError)  # a request that waits for the load is not at fault


def test_none_beside_a_model_that_is_adapted_as_a_whole(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", load_model(folder)[0])
    engine = Engine.open(EngineConfig(model=folder, adapter=adapter))
    with pytest.raises(AdapterError, match="whole model"):
        engine.adapters.mount("a", adapter)


def test_the_loop_mounts_and_unmounts_between_steps(tmp_path) -> None:
    """A request that came too late hears so; one under way ends, and then the weights are gone."""
    folder = write_checkpoint(tmp_path / "base", "llama")
    plain = Engine.open(EngineConfig(model=folder, parallel=2))
    adapter = write_adapter(tmp_path / "a", plain.adapters.model)
    loop = EngineLoop(EngineConfig(model=folder, parallel=2))
    loop.start()
    try:
        assert isinstance(asked(loop, lambda engine: engine.adapters.unmount("a")), AdapterNotFound)
        assert asked(loop, lambda engine: engine.adapters.mount("a", adapter)).name == "a"
        heard: queue.Queue = queue.Queue()
        loop.submit(request("a", 64), heard.put)
        while not isinstance(event := heard.get(timeout=60), Output):
            pass
        assert asked(loop, lambda engine: engine.adapters.unmount("a")).name == "a"
        late: queue.Queue = queue.Queue()
        loop.submit(request("a"), late.put)
        assert isinstance(late.get(timeout=60), AdapterNotFound)
        while event.finish_reason is None:
            event = heard.get(timeout=60)
        assert event.finish_reason == "length"
        asked(loop, lambda engine: None)  # the turn that it is answered in settles what the one before has ended
        assert asked(loop, lambda engine: engine.adapters.num_leaving) == 0
    finally:
        loop.stop()


def asked(loop: EngineLoop, question) -> object:
    answered: queue.Queue = queue.Queue()
    loop.ask(question, answered.put)
    return answered.get(timeout=60)


def test_a_question_of_ours_that_fails_is_answered_by_its_error(tmp_path) -> None:
    loop = EngineLoop(EngineConfig(model=write_checkpoint(tmp_path / "base", "llama")))
    loop.start()
    try:
        answer = asked(loop, lambda engine: engine.adapters.mount("a", tmp_path / "nowhere"))
        assert isinstance(answer, AdapterError)
        assert isinstance(answer, MlxcelError)
    finally:
        loop.stop()


def test_factors_are_padded_with_what_changes_nothing(watched, tmp_path, model) -> None:
    watched.engine.adapters.mount("a", written(tmp_path, model, rank=3))
    [_, alone] = low_rank_of(model.layers[0].self_attn.q_proj).factors
    watched.engine.adapters.mount("b", written(tmp_path, model, "b", rank=8))
    [_, beside, _] = low_rank_of(model.layers[0].self_attn.q_proj).factors
    assert np.array_equal(beside.down[:3], alone.down)
    assert np.array_equal(beside.up[:, :3], alone.up)
    assert not beside.down[3:].any()
    assert beside.rank == 3
