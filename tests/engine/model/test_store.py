import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError, ModelIncomplete, ModelNotFound
from engine.model import store as storing
from engine.model.store import MANIFEST, Store, check_complete, default_home, file_states, nearest
from tests.threads import in_threads


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


def test_a_copy_shares_weights_and_nothing_else(store: Store) -> None:
    add(store, "mlxcel/a")
    made = store.copy("a", "b")
    entry = store.find("a")
    assert entry is not None
    assert (made.name, made.source, made.size_bytes) == ("local/b", entry.source, entry.size_bytes)
    assert made.modified_s >= entry.modified_s
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        same = (made.path / name).samefile(entry.path / name)
        assert same is (name == "model.safetensors")
    assert store.taken_bytes([entry]) == entry.size_bytes + (entry.path / MANIFEST).stat().st_size
    weights = (entry.path / "model.safetensors").stat().st_size
    assert store.taken_bytes(store.list()) == 2 * store.taken_bytes([entry]) - weights


@pytest.mark.parametrize("removed", ["a", "b"])
def test_either_of_two_copies_outlives_the_other(store: Store, removed: str) -> None:
    add(store, "mlxcel/a")
    store.copy("a", "b")
    store.remove(removed)
    [left] = store.list()
    assert left.short_name != removed
    assert (left.path / "model.safetensors").read_bytes() == safetensors()
    check_complete(left.path)


def test_an_edited_file_of_a_copy_is_its_own(store: Store) -> None:
    add(store, "mlxcel/a")
    made = store.copy("a", "b")
    with open(made.path / "config.json", "a") as file:
        file.write(" ")
    assert store.find("a") is not None


def test_a_copy_without_links_is_a_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    add(store, "mlxcel/a")
    made = store.copy("a", "someone/b")
    assert not (made.path / "model.safetensors").samefile(store.models / "mlxcel/a/model.safetensors")
    check_complete(made.path)


def test_a_copy_that_fails_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, destination: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add(store, "mlxcel/a")
    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(ModelError, match="No space left on device"):
        store.copy("a", "b")
    assert [entry.name for entry in store.list()] == ["mlxcel/a"]
    assert list((store.models / "local").iterdir()) == []


def test_what_is_not_whole_is_not_copied(store: Store) -> None:
    add(store, "mlxcel/a")
    (store.models / "mlxcel/a/model.safetensors").write_bytes(b"")
    with pytest.raises(ModelIncomplete):
        store.copy("a", "b")
    assert list(store.models.glob("local/*")) == []


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b/c", "a/.b", "x y"])
def test_no_copy_leads_out_of_the_store(store: Store, name: str) -> None:
    add(store, "mlxcel/a")
    with pytest.raises(ModelError, match="no name for a model"):
        store.copy("a", name)


def test_two_copies_that_cross_do_not_wait_for_each_other(store: Store) -> None:
    add(store, "one/a")
    add(store, "one/b")

    def cross(number: int) -> None:
        names = [("one/a", "one/b"), ("one/b", "one/a")][number]
        for _ in range(20):
            with pytest.raises(ModelError, match="already"):
                store.copy(*names)
            store.remove(store.copy(names[0], f"copy{number}").name)

    in_threads(2, cross)
    assert [entry.name for entry in store.list()] == ["one/a", "one/b"]


def test_a_folder_outside_is_built_beside_its_place(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "[made]" / "here"
    with pytest.raises(ModelIncomplete), store.begin_outside(folder):
        pass
    assert list(folder.parent.iterdir()) == []
    stale, other = (folder.parent / f".{name}.0123abcd.partial" for name in ("here", "there"))
    for left in (stale, other):
        left.mkdir()
    with store.begin_outside(folder) as staging:
        assert not stale.exists()
        assert staging.parent == folder.parent
        assert not folder.exists()
        fill(staging)
    assert sorted(path.name for path in folder.parent.iterdir()) == [other.name, "here"]
    assert not (folder / MANIFEST).exists()
    assert store.list() == []


def test_names_that_differ_have_locks_that_differ(store: Store) -> None:
    add(store, "a/b--c")
    in_threads(1, lambda _: store.copy("a/b--c", "a--b/c"))
    assert [entry.name for entry in store.list()] == ["a/b--c", "a--b/c"]


def test_one_lock_is_held_where_case_alone_differs(store: Store) -> None:
    with store.locked("a/b"), store.locked("A/B"):
        assert len(list((store.home / "locks").iterdir())) == 1


@pytest.mark.parametrize("name", ["x", "local/x", "mlxcel/x", "mlx-community/x"])
@pytest.mark.parametrize("other", ["local/x", "mlxcel/x", "mlx-community/x"])
def test_no_new_name_means_another_model_or_hides_behind_it(store: Store, name: str, other: str) -> None:
    add(store, "one/y")
    add(store, other)
    with pytest.raises(ModelError, match=f"^{other} is in the store already") as caught:
        store.copy("one/y", name)
    assert "would be asked for as x: " in caught.value.hint
    assert store.copy("one/y", "two/x").short_name == "two/x"


@pytest.mark.parametrize("owner", ["local", "mlxcel", "mlx-community"])
def test_no_new_name_hides_a_built_in_model_or_all(store: Store, owner: str) -> None:
    for short, said in (("smollm2-135m", "smollm2-135m is the name of a built-in"), ("all", "all means every")):
        with pytest.raises(ModelError, match=said) as caught:
            store.free_name(f"{owner}/{short}")
        assert f"{owner}/{short} would be asked for as {short}: " in caught.value.hint
        assert store.free_name(f"someone/{short}") == f"someone/{short}"


def test_what_is_replaced_means_what_it_meant(store: Store) -> None:
    for name in ("local/x", "mlx-community/x"):
        add(store, name)
        assert store.free_name(name, replaces=True) == name


def test_a_short_name_that_several_have_is_none(store: Store) -> None:
    for name in ("local/x", "mlx-community/x", "mlx-community/y", "one/x"):
        add(store, name)
    assert [entry.short_name for entry in store.list()] == ["local/x", "mlx-community/x", "y", "one/x"]
    assert {"local/x", "mlx-community/x", "y"} < set(store.known_names())
    store.remove("x")
    assert [entry.short_name for entry in store.list()] == ["x", "y", "one/x"]


def test_what_leads_nowhere_takes_nothing(store: Store) -> None:
    add(store, "one/a")
    [entry] = store.list()
    taken = store.taken_bytes([entry])
    (entry.path / "link").symlink_to("nothing")
    assert store.taken_bytes([entry]) == taken
    store.remove("one/a")
    assert store.taken_bytes([entry]) == 0


def test_folders_that_go_while_bytes_are_counted_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"1234")
    (tmp_path / "gone").mkdir()
    scandir = os.scandir

    def vanishing(path: str | Path) -> object:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert [state.st_size for state in file_states(tmp_path)] == [4]


def test_what_is_removed_meanwhile_is_not_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(folder: Path, _: dict[str, int]) -> None:
        (folder / MANIFEST).unlink()

    add(store, "one/a")
    monkeypatch.setattr(storing, "_first_mismatch", remove)
    assert store.list() == []


def test_a_store_that_cannot_be_written_keeps_what_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    add(store, "one/a")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ModelError, match=r"^one/a cannot be deleted: Read-only file system$"):
        store.remove("one/a")
    monkeypatch.setattr(storing, "open", refuse, raising=False)
    with pytest.raises(ModelError, match=f"^the store at {store.home} cannot be written: Read-only file system$"):
        store.remove("one/a")
    monkeypatch.undo()
    assert store.find("one/a") is not None
