import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download, snapshot_download

from engine.errors import FetchFailed, ModelError, ModelNotFound, UnsupportedModel
from engine.model import hub as hubs
from engine.model.hub import HubName, hub_name
from engine.model.pull import ensure, pull
from engine.model.store import Store, check_complete
from tests.engine.model.hub_double import GATED, Hub, commit_of, point_the_library_at, serving
from tests.engine.model.test_store import safetensors

SHARDS = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
NAME = "someone/tiny"
NOT_WANTED = ("README.md", "evil.py", "consolidated.safetensors", "pytorch_model.bin", ".gitattributes")


def checkpoint(*, length: int = 5000, said: str = "{}", shards: tuple[str, ...] = SHARDS) -> dict[str, bytes]:
    """The files of a small sharded checkpoint, among others that no checkpoint needs."""
    weight_map = {f"w{number}": shard for number, shard in enumerate(shards)}
    return {
        "config.json": said.encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hi",
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{shard: safetensors(length + number) for number, shard in enumerate(shards)},
        **dict.fromkeys(NOT_WANTED, b"not wanted"),
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub({NAME: [checkpoint()]})
    with serving(made):
        point_the_library_at(made, monkeypatch, str(tmp_path / "cache"))
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The library waits between its own attempts; here it only says so."""
    said: list[float] = []
    monkeypatch.setattr(file_download.time, "sleep", said.append)
    return said


def test_a_name_on_the_hub_becomes_an_entry_with_what_a_checkpoint_needs(hub: Hub, store: Store) -> None:
    stages: list[tuple[str, int, int | None]] = []
    folder = ensure(NAME, store=store, progress=lambda *said: stages.append(said))
    assert folder == store.models / NAME
    check_complete(folder)
    wanted = {name: body for name, body in hub.repositories[NAME][0].items() if name not in NOT_WANTED}
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."} == wanted
    assert sorted(path.name for path in folder.iterdir() if path.name[0] == ".") == [
        ".identities.json",
        ".mlxcel.json",
    ]
    [entry] = store.list()
    assert (entry.name, entry.source) == (NAME, f"{NAME} {commit_of(NAME, 0)[:12]}")
    total = sum(len(body) for body in wanted.values())
    assert {(stage, end) for stage, _, end in stages} == {("fetch", total)}
    done = [count for _, count, _ in stages]
    assert done == sorted(done)
    assert done[-1] == total
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_what_is_stored_is_used_without_asking(hub: Hub, store: Store) -> None:
    folder = ensure(NAME, store=store)
    hub.asked.clear()
    assert ensure(NAME, store=store) == folder
    assert hub.asked == []


def test_a_bare_name_is_one_of_the_mlx_community(hub: Hub, store: Store) -> None:
    hub.repositories["mlx-community/tiny"] = [checkpoint()]
    assert ensure("tiny", store=store) == store.models / "mlx-community/tiny"
    assert [entry.short_name for entry in store.list()] == ["tiny"]


def test_a_revision_is_an_entry_of_its_own(hub: Hub, store: Store) -> None:
    hub.repositories[NAME].append(checkpoint(said='{"new": 1}'))
    old, new = ensure(f"{NAME}@v0", store=store), ensure(NAME, store=store)
    assert (old.name, (old / "config.json").read_text()) == ("tiny@v0", "{}")
    assert (new / "config.json").read_text() == '{"new": 1}'
    hub.asked.clear()
    assert ensure(f"{NAME}@v0", store=store) == old
    assert hub.asked == []
    assert store.remove(f"{NAME}@v0").path == old
    with pytest.raises(ModelNotFound, match="has no revision 'v9'"):
        ensure(f"{NAME}@v9", store=store)


def test_force_fetches_what_is_there_again(hub: Hub, store: Store) -> None:
    ensure(NAME, store=store)
    hub.repositories[NAME].append(checkpoint(said='{"new": 1}'))
    assert (pull(NAME, store=store) / "config.json").read_text() == "{}"
    assert (pull(NAME, store=store, force=True) / "config.json").read_text() == '{"new": 1}'


def test_one_commit_holds_for_the_whole_fetch(hub: Hub, store: Store) -> None:
    def push(stage: str, done: int, total: int | None) -> None:
        if len(hub.repositories[NAME]) == 1:
            hub.repositories[NAME].append(checkpoint(length=9000, said='{"new": 1}'))

    folder = ensure(NAME, store=store, progress=push)
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / SHARDS[2]).read_bytes() == hub.repositories[NAME][0][SHARDS[2]]


def test_a_connection_that_breaks_is_continued(hub: Hub, store: Store, naps: list[float]) -> None:
    hub.cut[SHARDS[1]] = 3500
    check_complete(ensure(NAME, store=store))
    assert hub.gets(SHARDS[1]) == [None, "bytes=3000-"]
    assert naps == [1]


def test_a_hub_that_ignores_ranges_starts_the_file_anew(hub: Hub, store: Store, naps: list[float]) -> None:
    hub.cut[SHARDS[1]], hub.ignores_range = 3500, True
    check_complete(ensure(NAME, store=store))


def stop_at(bytes_done: int) -> hubs.Progress:
    def tell(stage: str, done: int, total: int | None) -> None:
        if done >= bytes_done:
            raise KeyboardInterrupt

    return tell


def test_an_interrupted_fetch_goes_on_where_it_was(hub: Hub, store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        ensure(NAME, store=store, progress=stop_at(7500))
    assert store.list() == []
    hub.asked.clear()
    check_complete(ensure(NAME, store=store))
    assert hub.gets(SHARDS[0]) == []
    assert hub.gets("config.json") == []
    [resumed] = hub.gets(SHARDS[1])
    assert resumed is not None
    assert hub.gets(SHARDS[2]) == [None]
    assert os.listdir(store.models / "someone") == ["tiny"]


def test_parts_of_a_file_that_changed_are_thrown_away(hub: Hub, store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        ensure(NAME, store=store, progress=stop_at(7500))
    changed = checkpoint(said='{"new": 1}')
    changed[SHARDS[1]] = safetensors(5001)[:-8] + b"changed!"
    hub.repositories[NAME].append(changed)
    hub.asked.clear()
    folder = ensure(NAME, store=store)
    assert {name: (folder / name).read_bytes() for name in SHARDS} == {name: changed[name] for name in SHARDS}
    assert hub.gets(SHARDS[0]) == []
    assert hub.gets(SHARDS[1]) == [None]


def test_what_another_commit_had_besides_is_gone(hub: Hub, store: Store) -> None:
    hub.repositories[NAME][0]["added_tokens.json"] = b"{}"
    with pytest.raises(KeyboardInterrupt):
        ensure(NAME, store=store, progress=stop_at(7500))
    hub.repositories[NAME].append(checkpoint(shards=("model.safetensors",)))
    names = {path.name for path in ensure(NAME, store=store).iterdir()}
    assert "added_tokens.json" not in names
    assert not names & set(SHARDS)


def test_content_that_is_not_what_the_hub_lists_is_refused(hub: Hub, store: Store) -> None:
    whole = hub.repositories[NAME][0][SHARDS[1]]
    hub.served_as[SHARDS[1]] = whole[:-1] + b"!"
    with pytest.raises(FetchFailed, match=f"{SHARDS[1]} of {NAME} came with content"):
        ensure(NAME, store=store)
    assert store.list() == []
    hub.served_as[SHARDS[1]] = whole + b"!"
    with pytest.raises(FetchFailed, match="another length"):
        ensure(NAME, store=store)
    hub.served_as.clear()
    check_complete(ensure(NAME, store=store))


def test_an_index_that_names_a_missing_file_is_refused_before_the_weights_come(hub: Hub, store: Store) -> None:
    del hub.repositories[NAME][0][SHARDS[2]]
    with pytest.raises(ModelError, match=SHARDS[2]):
        ensure(NAME, store=store)
    assert hub.gets(SHARDS[0]) == []


@pytest.mark.parametrize(("missing", "hint"), [("config.json", ""), ("tokenizer.json", ""), ("", "GGUF")])
def test_what_is_no_checkpoint_is_refused(hub: Hub, store: Store, missing: str, hint: str) -> None:
    files = {name: body for name, body in checkpoint().items() if name != missing}
    if not missing:
        files = {"m.Q4_K_M.gguf": b"GGUF", "config.json": b"{}"}
    hub.repositories[NAME] = [files]
    with pytest.raises(UnsupportedModel, match="no checkpoint") as caught:
        ensure(NAME, store=store)
    assert hint in caught.value.hint


def test_what_does_not_fit_on_the_disk_is_refused_before_it_comes(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(hubs.shutil.os, "statvfs", lambda _: full)
    with pytest.raises(ModelError, match="0 B of the disk are free"):
        ensure(NAME, store=store)
    assert hub.gets(SHARDS[0]) == []


def test_a_fetch_that_was_given_up_can_be_removed(hub: Hub, store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        ensure(NAME, store=store, progress=stop_at(7500))
    removed = store.remove(NAME)
    assert removed.source == "incomplete"
    assert removed.size_bytes > 7000
    assert os.listdir(store.models / "someone") == []


@pytest.mark.parametrize(
    ("status", "headers", "kind", "said", "hint"),
    [
        (403, GATED, FetchFailed, "is gated", "accept its terms"),
        (401, GATED, FetchFailed, "is gated", "HF_TOKEN"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, FetchFailed, "401", "HF_TOKEN"),
        (403, {}, FetchFailed, "403", "HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, ModelNotFound, "the hub has no someone/tiny", "HF_TOKEN"),
        (500, {}, FetchFailed, "500", "kept"),
    ],
)
def test_a_refusal_is_one_line_and_a_hint(
    hub: Hub, store: Store, status: int, headers: dict[str, str], kind: type[ModelError], said: str, hint: str
) -> None:
    hub.refuse[NAME] = (status, headers)
    with pytest.raises(kind, match=said) as caught:
        ensure(NAME, store=store)
    assert "\n" not in str(caught.value)
    assert hint in caught.value.hint


def test_no_such_name_says_what_may_have_been_meant(hub: Hub, store: Store) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ensure("smollm2-135", store=store)
    assert "no model is known as 'smollm2-135': the hub has no mlx-community/smollm2-135" in str(caught.value)
    assert caught.value.hint.startswith("did you mean smollm2-135m? a model is an existing folder or .gguf file, ")
    assert caught.value.hint.endswith("HF_TOKEN holds the token of an account that may read it")


def test_a_hub_out_of_reach_is_one_line(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchFailed, match="the hub cannot be reached for someone/tiny: ") as caught:
        ensure(NAME, store=store)
    assert "HF_ENDPOINT" in caught.value.hint


@pytest.mark.parametrize("body", [b"<html>log in first</html>", b"[]", b'{"id": "x"}', b'{"sha": 1}'])
def test_what_is_no_hub_is_one_line(hub: Hub, store: Store, body: bytes) -> None:
    hub.says_instead = body
    with pytest.raises(FetchFailed) as caught:
        ensure(NAME, store=store)
    assert "\n" not in str(caught.value)


def test_offline_only_what_is_here_is_used(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure(NAME, store=store)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert ensure(NAME, store=store) == folder
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        ensure("someone/else", store=store)
    assert hub.asked == []


def test_the_token_goes_to_the_hub(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ensure(NAME, store=store)
    assert {token for *_, token in hub.asked} == {"Bearer hf_secret"}


def test_a_whole_snapshot_in_the_librarys_cache_is_used_in_place(hub: Hub, store: Store, tmp_path: Path) -> None:
    snapshot = Path(snapshot_download(NAME, cache_dir=tmp_path / "cache"))
    before = sorted((path, path.lstat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*"))
    hub.asked.clear()
    assert ensure(NAME, store=store) == snapshot
    assert hub.asked == []
    assert store.list() == []
    assert sorted((path, path.lstat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*")) == before
    assert pull(NAME, store=store, force=True) == store.models / NAME


@pytest.mark.parametrize("missing", [SHARDS[1], "chat_template.jinja"])
def test_a_snapshot_in_the_librarys_cache_that_is_not_whole_is_not_used(
    hub: Hub, store: Store, tmp_path: Path, missing: str
) -> None:
    (Path(snapshot_download(NAME, cache_dir=tmp_path / "cache")) / missing).unlink()
    assert ensure(NAME, store=store) == store.models / NAME


def test_a_snapshot_without_a_listing_is_held_against_its_index(hub: Hub, store: Store, tmp_path: Path) -> None:
    commit = commit_of(NAME, 0)
    snapshot = tmp_path / "cache" / "models--someone--tiny" / "snapshots" / commit
    for name, content in hub.repositories[NAME][0].items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(content)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    assert ensure(NAME, store=store) == snapshot
    (snapshot / SHARDS[1]).unlink()
    assert ensure(NAME, store=store) == store.models / NAME


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("tiny", HubName("mlx-community/tiny")),
        ("someone/Tiny-1.5B_v2", HubName("someone/Tiny-1.5B_v2")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("tiny@v1.0", HubName("mlx-community/tiny", "v1.0")),
        ("gone.gguf", None), ("a/b/c", None), ("../a", None), ("~a/b", None), ("a/b@", None), ("a b", None),
        ("a/..", None), ("a\0b", None),
    ],
)  # fmt: skip
def test_what_is_a_name_on_the_hub(reference: str, name: HubName | None) -> None:
    assert hub_name(reference) == name


def test_a_name_that_the_hub_cannot_hold_is_unknown(hub: Hub, store: Store) -> None:
    for reference in ("m" * 5000, "a/b--c"):
        with pytest.raises(ModelNotFound):
            ensure(reference, store=store)
    assert hub.asked == []


def test_a_fetch_asks_for_the_commit_and_the_listing_once(hub: Hub, store: Store) -> None:
    ensure(NAME, store=store)
    assert [path for _, path, *_ in hub.asked if "/api/models/" in path] == [
        f"/api/models/{NAME}",
        f"/api/models/{NAME}/tree/{commit_of(NAME, 0)}",
    ]


def test_the_folders_of_modules_come_with_it(hub: Hub, store: Store) -> None:
    """And no other folder does, nor other files of theirs."""
    files = hub.repositories[NAME][-1]
    modules = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b'{"a": 1}',
        "2_Dense/model.safetensors": files[SHARDS[0]],
        "2_Dense/pytorch_model.bin": b"no",
        "onnx/config.json": b"{}",
    }
    hub.repositories[NAME].append(files | modules)
    folder = ensure(NAME, store=store)
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert here >= {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert not here & {"2_Dense/pytorch_model.bin", "onnx/config.json"}
    assert [entry.name for entry in store.list()] == [NAME]
    assert "1_Pooling/config.json" in json.loads((folder / ".identities.json").read_text())


def test_the_folder_of_a_module_that_another_commit_had_is_gone(hub: Hub, store: Store) -> None:
    files = hub.repositories[NAME][-1]
    hub.repositories[NAME].append(files | {"modules.json": b"[]", "1_Pooling/config.json": b"{}"})
    ensure(NAME, store=store)
    hub.repositories[NAME].append(files)
    folder = pull(NAME, store=store, force=True)
    assert not [path for path in folder.rglob("*") if "Pooling" in path.name and path.is_file()]
