"""What is said before loading is what is held after it."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from engine.cache.adapter import SequenceStorage
from engine.errors import ModelIncomplete, UnsupportedModel, UntrustedCode
from engine.model import inspect, load, placement
from engine.model.inspect import Description, Layers, layers_of
from engine.request import Storable
from engine.size import Bound
from tests.engines import Watched
from tests.tiny import END_OF_TURN, VOCAB_SIZE, write_checkpoint, write_tokenizer

describe = partial(inspect.describe, kernels="not used")

FAMILIES = {
    "llama": (Layers("full", 2, token_bytes=2 * 2 * 8 * 4),),
    "gemma3_text": (
        Layers("window", 2, token_bytes=2 * 8 * 4, window=8),
        Layers("full", 1, token_bytes=2 * 8 * 4),
    ),
    "mamba2": (Layers("state", 2, token_bytes=0, fixed_bytes=4 * (3 * (64 + 2 * 8) + 8 * 8 * 8)),),
}
LENGTHS = (1, 7, 64, 256, 700)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_told_by_kind_without_evaluating_anything(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    said = describe(folder)
    assert mx.get_peak_memory() - before < said.weight_bytes / 4
    assert said.layers == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_that_mlx_lms_caches_keep_of_a_prompt(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    said, model = describe(folder), load.load(folder).model
    for num_tokens in (256, 512):  # where the buffers of mlx-lm's caches are full
        storage = SequenceStorage(model)
        for piece in (num_tokens - 9, 8, 1):
            model(mx.ones((1, piece), mx.int32), cache=storage.caches)
            mx.eval(storage.arrays())
        held = sum(array.nbytes for array in storage.arrays())
        assert sum(group.stored_bytes(num_tokens) for group in said.layers) == held


@pytest.mark.parametrize("cache_dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_the_engine_holds_no_more_than_is_said(family: str, cache_dtype: str, tmp_path: Path) -> None:
    """Once its mode is known; before, what its own types take is said."""
    folder = write_checkpoint(tmp_path, family)
    before = inspect.describe(folder, cache_dtype=cache_dtype)
    acts = family != "mamba2"
    watched = Watched(folder, cache_dtype=cache_dtype if acts else "auto", decode_storage_backend="dense")
    said = inspect.describe(folder, cache_dtype=cache_dtype)
    assert said.token_bytes <= before.token_bytes == inspect.describe(folder, cache_dtype="float32").token_bytes
    assert said.weight_bytes == load.load(folder).weight_bytes
    for backend in ("auto", "dense"):
        told = Watched(
            folder,
            cache_dtype=watched.engine.config.cache_dtype,
            kv_cache_budget=Bound("3MB"),
            decode_storage_backend=backend,
        ).engine
        paged = told.config.pages_rows(pageable=said.pageable, num_slots=told.num_slots)
        assert paged == (told.storage_backend == "paged")
        fit = said.fit(told.num_slots, 4096, asked=Bound("3MB"), paged=paged)
        assert told.storable == Storable(fit.budget_bytes, said.weight_bytes, said.token_bytes, fit.row_bytes)
    for num_tokens in LENGTHS:
        row = watched.engine.submit(watched.request("a", num_tokens, 9))
        watched.store(row, 256)
        assert row.storage is not None
        held = sum(array.nbytes for array in row.storage.arrays())
        stored = sum(group.stored_bytes(num_tokens) for group in said.layers)
        assert stored <= held <= said.fit(1, num_tokens).row_bytes


def test_the_rest_is_what_loading_finds(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gemma3_text")
    said, loaded = describe(folder), load.load(folder)
    assert (said.path, said.architecture, said.model_type) == (folder, "Model", "gemma3_text")
    assert (said.context_length, said.context_is_stated) == (loaded.context_length, True)
    assert (said.vocab_size, said.end_tokens) == (VOCAB_SIZE, ((END_OF_TURN, "<|im_end|>"),))
    assert (said.tokenizer, said.has_chat_template) == ("tokenizer.json", True)
    assert (said.packings, said.dtypes, said.expands) == ((), ("float32",), False)
    assert 4 * said.num_parameters == said.stored_bytes == said.weight_bytes <= said.file_bytes
    write_tokenizer(folder, template=None)
    assert not describe(folder).has_chat_template


def test_what_loading_refuses_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace("{", '{"model_file": "x.py", ', 1)
    )
    with pytest.raises(UntrustedCode):
        describe(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelIncomplete):
        describe(folder)


def test_a_model_whose_forward_raises_is_unsupported(tmp_path: Path) -> None:
    model = load.load(write_checkpoint(tmp_path)).model
    model.model.layers[1].self_attn.q_proj = None
    with pytest.raises(UnsupportedModel, match="no forward of this model can be built: "):
        layers_of(model)


def test_bytes_follow_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)
    roomy = describe(folder)
    row_bytes = roomy.fit(1, 1000).row_bytes

    def with_room_for(num_bytes: int) -> Description:
        monkeypatch.setattr(placement, "available_bytes", lambda: roomy.weight_bytes + num_bytes)
        return describe(folder)

    tight, none = with_room_for(2 * row_bytes), with_room_for(0)
    assert (roomy.largest_context(2), none.largest_context(2)) == (4096, 0)
    assert tight.fit(2, 1000).fits
    assert tight.largest_context(2) >= 1000
    assert not tight.fit(2, tight.largest_context(2) + 1).fits
    assert tight.fit(2, tight.largest_context(2)).fits


@pytest.mark.real
def test_the_built_in_model(real_checkpoint: Path) -> None:
    said = describe(real_checkpoint)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert said.num_parameters == 134_515_008
    assert [(p.bits, p.num_parameters) for p in said.packings] == [(4, 106_168_320), (8, 28_311_552)]
    assert said.layers[0].count == 30
    if on_cpu:
        assert said.expands
        assert (said.weight_bytes, said.token_bytes) == (538_060_032, 46_080)
    assert said.weight_bytes == load.load(real_checkpoint).weight_bytes
