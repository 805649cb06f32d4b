import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelIncomplete, ModelNotFound
from engine.model.store import MANIFEST, Store, check_complete, default_home, nearest


def safetensors(length: int = 16) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(length)


def fill(folder: Path, *, shards: tuple[str, ...] = ("model.safetensors",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    for shard in shards:
        (folder / shard).write_bytes(safetensors())
    if len(shards) > 1:
        weight_map = {f"w{number}": shard for number, shard in enumerate(shards)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def add(store: Store, name: str) -> None:
    with store.begin(name, source="test") as staging:
        fill(staging)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_an_entry_is_listed_found_and_removed(store: Store) -> None:
    add(store, "mlxcel/b")
    add(store, "gguf/a")
    assert [entry.name for entry in store.list()] == ["gguf/a", "mlxcel/b"]
    entry = store.find("b")
    assert entry is not None
    assert entry == store.find("mlxcel/b")
    assert (entry.short_name, entry.source) == ("b", "test")
    assert entry.size_bytes == sum(path.stat().st_size for path in entry.path.iterdir() if path.name != MANIFEST)
    assert store.remove("b") == entry
    assert store.find("b") is None
    assert [entry.short_name for entry in store.list()] == ["gguf/a"]


def test_an_entry_is_replaced_as_a_whole(store: Store) -> None:
    add(store, "mlxcel/a")
    with store.begin("mlxcel/a", source="again") as staging:
        fill(staging)
        (staging / "extra.json").write_text("{}")
        assert store.list()[0].source == "test"
    assert [(entry.name, entry.source) for entry in store.list()] == [("mlxcel/a", "again")]
    assert [path.name for path in (store.models / "mlxcel").iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["../../etc", "a/../b", "/etc/passwd", "mlxcel/..", ".hidden", "", "a/b/c"])
def test_no_name_leads_out_of_the_store(store: Store, name: str) -> None:
    assert store.find(name) is None
    with pytest.raises(ModelNotFound):
        store.remove(name)


def test_removing_the_unknown_names_the_nearest(store: Store) -> None:
    add(store, "mlxcel/smollm2-135m")
    with pytest.raises(ModelNotFound) as caught:
        store.remove("smolm2")
    assert "smollm2-135m" in caught.value.hint


def test_a_failed_block_leaves_nothing(store: Store) -> None:
    def attempt() -> None:
        with store.begin("mlxcel/a") as staging:
            fill(staging)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        attempt()
    assert store.list() == []
    assert list((store.models / "mlxcel").iterdir()) == []


def test_a_block_that_leaves_no_checkpoint_leaves_nothing(store: Store) -> None:
    def attempt() -> None:
        with store.begin("mlxcel/a") as staging:
            fill(staging)
            (staging / "tokenizer.json").unlink()

    with pytest.raises(ModelIncomplete):
        attempt()
    assert store.list() == []


def test_a_changed_file_ends_completeness_and_rm_still_works(store: Store) -> None:
    add(store, "mlxcel/a")
    folder = store.models / "mlxcel/a"
    (folder / "config.json").write_text("{} ")
    assert store.find("a") is None
    with pytest.raises(ModelIncomplete, match=r"config\.json"):
        check_complete(folder)
    assert store.remove("a").source == "incomplete"
    assert not folder.exists()


@pytest.mark.parametrize("point", ["staging", "manifest", "rename"])
def test_a_killed_process_leaves_no_entry_and_the_next_one_cleans_up(tmp_path: Path, point: str) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
from engine.model import store
from tests.engine.model.test_store import fill
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if {point!r} == "manifest": store._write_manifest = die
if {point!r} == "rename": store.os.rename = die
with store.Store(Path({str(tmp_path)!r})).begin("mlxcel/a") as staging:
    fill(staging)
    if {point!r} == "staging": die()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    store = Store(tmp_path)
    assert store.list() == []
    assert len(list((store.models / "mlxcel").iterdir())) == 1
    add(store, "mlxcel/a")
    assert [path.name for path in (store.models / "mlxcel").iterdir()] == ["a"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_check_complete_names_what_is_missing(tmp_path: Path, missing: str) -> None:
    folder = fill(tmp_path / "m")
    check_complete(folder)
    (folder / missing).unlink()
    with pytest.raises(ModelIncomplete, match=missing):
        check_complete(folder)


def test_every_file_of_the_index_must_be_there(tmp_path: Path) -> None:
    shards = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
    folder = fill(tmp_path / "m", shards=shards)
    check_complete(folder)
    (folder / shards[1]).unlink()
    with pytest.raises(ModelIncomplete, match=shards[1]):
        check_complete(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelIncomplete, match=shards[1]):
        check_complete(folder)


def test_a_weights_file_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    for cut in (len(whole) - 1, 20, 4, 0):
        (folder / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ModelIncomplete, match="cut short"):
            check_complete(folder)


def test_the_home_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXCEL_HOME", str(tmp_path))
    assert default_home() == tmp_path
    monkeypatch.delenv("MLXCEL_HOME")
    assert default_home() == Path.home() / ".cache" / "mlxcel"


def test_nearest_ignores_case() -> None:
    assert nearest("SMOLLM-135", ["smollm2-135m", "qwen3-0.6b"]) == ["smollm2-135m"]


def test_store_and_pull_load_nothing_heavy() -> None:
    heavy = ("mlx", "mlx_lm", "numpy", "gguf", "tokenizers", "transformers", "httpx2", "huggingface_hub")
    modules = "engine.model.store, engine.model.pull, engine.model.hub"
    script = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
