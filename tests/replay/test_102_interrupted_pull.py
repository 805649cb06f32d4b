"""Case 102: a pull that was killed is not a model, and the next one goes on without mixing two versions of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelIncomplete
from engine.model.pull import ensure
from engine.model.store import Store, check_complete
from tests.engine.model.hub_double import Hub, environment_of, point_the_library_at, serving
from tests.engine.model.test_hub import SHARDS, checkpoint

NAME = "someone/tiny"
KILLED = """
import os, signal, sys
from pathlib import Path
from huggingface_hub import constants
from engine.model import pull, store

home, name, point = sys.argv[1:]
constants.DOWNLOAD_CHUNK_SIZE = 1000

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "manifest":
    store._write_manifest = die
if point == "rename":
    store.os.rename = die
at = int(point) if point.isdigit() else 1 << 60
pull.ensure(name, store=store.Store(Path(home)), progress=lambda stage, done, total: done >= at and die())
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub({NAME: [checkpoint()]})
    with serving(made):
        point_the_library_at(made, monkeypatch, str(tmp_path / "cache"))
        yield made


def killed(hub: Hub, home: Path, point: str) -> Store:
    """A store in which another process was pulling until it was killed at `point`."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(home), NAME, point],
        env={**os.environ, **environment_of(hub, str(home / "cache"))},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    hub.asked.clear()
    return Store(home)


# After the small files and the first shard, in the middle of the second, and when everything has come.
@pytest.mark.parametrize("point", ["5222", "7500", "manifest", "rename"])
def test_a_killed_pull_is_no_model_and_is_continued(hub: Hub, tmp_path: Path, point: str) -> None:
    store = killed(hub, tmp_path / "home", point)
    assert store.list() == []
    assert store.find(NAME) is None
    [left] = (store.models / "someone").iterdir()
    if point.isdigit():
        with pytest.raises(ModelIncomplete, match="is missing"):
            check_complete(left)
        assert (left / "config.json").is_file()
    folder = ensure(NAME, store=store)
    check_complete(folder)
    assert {name: (folder / name).read_bytes() for name in SHARDS} == {
        name: hub.repositories[NAME][0][name] for name in SHARDS
    }
    assert hub.gets(SHARDS[0]) == []
    ranges = {"5222": [None], "7500": ["bytes=3000-"]}.get(point, [])
    assert hub.gets(SHARDS[1]) == ranges
    assert os.listdir(store.models / "someone") == ["tiny"]


def test_what_changed_upstream_meanwhile_is_not_mixed_in(hub: Hub, tmp_path: Path) -> None:
    store = killed(hub, tmp_path / "home", "7500")
    changed = checkpoint(length=5000, said='{"new": 1}')
    for shard in SHARDS[:2]:
        changed[shard] = changed[shard][:-4] + b"new!"
    hub.repositories[NAME].append(changed)
    folder = ensure(NAME, store=store)
    check_complete(folder)
    wanted = [*SHARDS, "config.json"]
    assert {name: (folder / name).read_bytes() for name in wanted} == {name: changed[name] for name in wanted}
    assert hub.gets(SHARDS[0]) == hub.gets(SHARDS[1]) == [None]
