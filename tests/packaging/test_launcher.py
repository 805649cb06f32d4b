"""The executable unpacks what it carries once, whole or not at all, and starts it as its own from then on."""

import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.packaging.executable import packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the executable is for Linux")
TELLS = '#!/bin/sh\nprintf "%s\\n" "$0" "$@"\nenv | grep -E "^(PYTHON|LD_|HOME)"\n[ "$3" != wait ] || read x\n'
LONG = f"{'folder' * 15}/{'file' * 20}"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tells with which arguments and environment it was started."""
    return packed(tmp_path_factory.mktemp("program"), TELLS, **{LONG: "x" * 3_000_000})


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Run:
    def start(*arguments: str, executable: Path = program, **options: object) -> subprocess.CompletedProcess[str]:
        settings = {"env": {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}, **options}
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [executable, *arguments], capture_output=True, text=True, check=False, **settings
        )

    return start


@pytest.fixture
def shared(program: Path) -> Iterator[Path]:
    """A folder that everybody can enter, with the program."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    shutil.copy(program, folder / "mlxcel")
    yield folder
    shutil.rmtree(folder)


def has_open(process: subprocess.Popen[bytes], path: Path) -> bool:
    return any(opened.resolve() == path for opened in Path(f"/proc/{process.pid}/fd").iterdir())


def unpacked(home: Path) -> list[str]:
    return sorted(name for name in os.listdir(home / ".cache/mlxcel/binary") if name != ".lock")


def test_starts_what_it_carries_from_where_it_unpacked_it(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        ended = run("run", "-p", "two words", "")
        (name,) = unpacked(tmp_path)
        place = tmp_path / ".cache/mlxcel/binary" / name
        told = [str(place / "bin/python3"), "-I", str(place / "bin/mlxcel"), "run", "-p", "two words", ""]
        assert ended.stdout.splitlines()[: len(told)] == told
        assert ended.stderr == ""
    assert (place / LONG).stat().st_size == 3_000_000
    assert (place / "bin/python3").stat().st_mode & 0o777 == 0o755


def test_a_later_start_writes_nothing(run: Run, tmp_path: Path) -> None:
    run()
    (name,) = unpacked(tmp_path)
    folder = tmp_path / ".cache/mlxcel/binary"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != name}
    run()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != name} == before


def test_a_first_start_removes_what_killed_ones_left_and_what_nobody_starts(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / ".cache/mlxcel/binary"
    old_s = time.time() - 31 * 24 * 60 * 60
    kept = {"0123456789abcdef": time.time(), "fedcba9876543210": old_s, "ABCDEF0123456789": old_s, "notes": old_s}
    for name, started_s in {**kept, "0000000000000000": old_s, ".new-0000000000000001": time.time()}.items():
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin/python3").write_text("")
        os.utime(folder / name, (started_s, started_s))
    folder.chmod(0o700)
    held = os.open(folder / "fedcba9876543210", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert run().returncode == 0
    os.close(held)
    (name,) = set(unpacked(tmp_path)) - set(kept)
    assert set(unpacked(tmp_path)) == {name, *kept}
    assert (folder / name / "bin/python3").stat().st_size > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root unpacks for others")
def test_what_root_unpacked_serves_others_and_stays(run: Run, shared: Path) -> None:
    settings = {"executable": shared / "mlxcel", "env": {"PATH": os.environ["PATH"], "MLXCEL_HOME": str(shared)}}
    older = shared / "binary/0000000000000000"
    older.mkdir(parents=True)
    os.utime(older, (1, 1))
    assert run(umask=0o077, **settings).returncode == 0
    assert older.exists()
    ended = run(user=12345, group=12345, extra_groups=[], **settings)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_start_holds_the_program_and_says_when_it_was(program: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for _ in range(2):
        waiting = subprocess.Popen(
            [program, "wait"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert waiting.stdout is not None
        waiting.stdout.readline()
        (name,) = unpacked(tmp_path)
        folder = os.open(tmp_path / ".cache/mlxcel/binary" / name, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert os.fstat(folder).st_mtime > time.time() - 60
        waiting.communicate()
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        os.utime(tmp_path / ".cache/mlxcel/binary" / name, (1, 1))


def test_settings_of_another_python_do_not_reach_it(run: Run, tmp_path: Path) -> None:
    others = {"PYTHONPATH": "/a", "PYTHONHOME": "/b", "PYTHONSTARTUP": "/c", "LD_LIBRARY_PATH": "/d"}
    told = run(env={**others, "PATH": os.environ["PATH"], "HOME": str(tmp_path)}).stdout.splitlines()
    assert sorted(line for line in told if "=" in line) == [
        f"HOME={tmp_path}",
        "LD_LIBRARY_PATH=/d",
        "PYTHONNOUSERSITE=1",
        "PYTHONSAFEPATH=1",
    ]


@pytest.mark.parametrize("given", ["{home}/models", "~/models", "models"])
def test_the_stores_folder_is_the_programs_too(run: Run, tmp_path: Path, given: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MLXCEL_HOME": given.format(home=tmp_path)}
    assert run(env=environment, cwd=tmp_path).returncode == 0
    assert (tmp_path / "models/binary").is_dir()


def test_a_given_folder_is_enough(run: Run, tmp_path: Path) -> None:
    told = run(env={"PATH": os.environ["PATH"], "MLXCEL_HOME": str(tmp_path)})
    assert told.returncode == 0
    assert (tmp_path / "binary").is_dir()


def test_first_starts_at_once_all_work(program: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    starts = [subprocess.Popen([program], env=environment, stdout=subprocess.PIPE) for _ in range(6)]
    told = {start.communicate()[0] for start in starts}
    assert [start.returncode for start in starts] == [0] * 6
    assert len(told) == 1
    assert len(unpacked(tmp_path)) == 1


def test_what_a_killed_start_left_is_not_taken_for_whole(run: Run, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    killed = run(preexec_fn=limit)
    assert killed.returncode == -signal.SIGXFSZ
    (left,) = unpacked(tmp_path)
    assert left.startswith(".new-")
    assert run().returncode == 0
    (name,) = unpacked(tmp_path)
    assert not name.startswith(".")


def test_a_full_disk_is_an_error_that_names_the_variable(run: Run, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    ended = run(preexec_fn=limit)
    assert ended.returncode == 1
    error, hint = ended.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path}/.cache/mlxcel/binary/.new-")
    assert error.endswith("cannot be unpacked: File too large")
    assert hint == "hint: MLXCEL_HOME names another folder for it"
    assert unpacked(tmp_path) == []


def test_a_home_that_cannot_be_written_is_an_error_that_names_the_variable(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file")
    ended = run()
    assert ended.returncode == 1
    error, hint = ended.stderr.splitlines()
    assert error == f"error: {tmp_path}/.cache/mlxcel cannot be made: Not a directory"
    assert "MLXCEL_HOME" in hint


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_what_others_may_write_to_is_not_run(run: Run, tmp_path: Path, mode: int) -> None:
    run()
    (name,) = unpacked(tmp_path)
    (tmp_path / ".cache/mlxcel/binary" / name).chmod(mode)
    ended = run()
    assert ended.returncode == 1
    assert "others may write to it" in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_belongs_to_somebody_else_is_not_run(run: Run, tmp_path: Path) -> None:
    run()
    (name,) = unpacked(tmp_path)
    os.chown(tmp_path / ".cache/mlxcel/binary" / name, 12345, -1)
    assert "belongs to somebody else" in run().stderr


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
@pytest.mark.parametrize("started", [False, True])
def test_a_folder_of_programs_that_others_may_write_to_is_refused(
    run: Run, tmp_path: Path, mode: int, started: bool
) -> None:
    folder = tmp_path / ".cache/mlxcel/binary"
    folder.mkdir(parents=True)
    assert not started or run().returncode == 0
    before = unpacked(tmp_path)
    folder.chmod(mode)
    ended = run()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"error: {folder} is not safe: others may write to it\n"
        "hint: remove it and start again, or MLXCEL_HOME names another folder for it\n"
    )
    assert unpacked(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["", ".lock"])
def test_a_folder_of_programs_or_a_lock_of_somebody_else_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    given = tmp_path / ".cache/mlxcel/binary" / name
    given.parent.mkdir(parents=True)
    given.touch() if name else given.mkdir()
    os.chown(given, 12345, -1)
    ended = run()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error: {given} belongs to somebody else\n")


def test_a_lock_that_others_may_write_to_is_refused(run: Run, tmp_path: Path) -> None:
    lock = tmp_path / ".cache/mlxcel/binary/.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    lock.chmod(0o666)
    ended = run()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error: {lock} is not safe: others may write to it\n")


def test_a_lock_that_is_a_link_is_not_followed(run: Run, tmp_path: Path) -> None:
    lock = tmp_path / ".cache/mlxcel/binary/.lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to(tmp_path / "elsewhere")
    ended = run()
    assert ended.returncode == 1
    assert f"error: {lock} cannot be written" in ended.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_of_programs_that_others_may_move_away_is_refused(run: Run, tmp_path: Path) -> None:
    around = tmp_path / ".cache/mlxcel"
    assert run().returncode == 0
    around.chmod(0o1777)
    assert run().returncode == 0
    around.chmod(0o777)
    ended = run()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"error: others may move {around / 'binary'} away\n"
        "hint: chmod o-w ends that, or MLXCEL_HOME names another folder for it\n"
    )


def test_what_came_while_a_start_waited_is_looked_at_too(run: Run, program: Path, tmp_path: Path) -> None:
    run()
    (name,) = unpacked(tmp_path)
    folder = tmp_path / ".cache/mlxcel/binary"
    (folder / name).rename(tmp_path / "aside")
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [program], env={"HOME": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while waiting.poll() is None and not has_open(waiting, folder / ".lock"):
            pass
        (tmp_path / "aside").chmod(0o777)
        (tmp_path / "aside").rename(folder / name)
    told, said = waiting.communicate()
    assert (waiting.returncode, told) == (1, b"")
    assert said.startswith(f"error: {folder / name} is not safe: others may write to it\n".encode())


@pytest.mark.parametrize(
    ("python", "mode", "hint"),
    [
        ("#!/no/loader\n", 0o755, "it needs the GNU C library, and this system has another"),
        (TELLS, 0o644, "MLXCEL_HOME names another folder for it"),
        (None, 0, "remove that folder, and it is unpacked again"),
    ],
    ids=["another C library", "not executable", "gone"],
)
def test_what_cannot_be_started_says_what_helps(
    run: Run, tmp_path: Path, python: str | None, mode: int, hint: str
) -> None:
    run()
    (name,) = unpacked(tmp_path)
    started = tmp_path / ".cache/mlxcel/binary" / name / "bin/python3"
    started.unlink()
    if python is not None:
        started.write_text(python)
        started.chmod(mode)
    ended = run()
    assert ended.returncode == 1
    error, said = ended.stderr.splitlines()
    assert error.startswith(f"error: {started} cannot be started: ")
    assert said == f"hint: {hint}"


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_download_that_broke_off_is_said(run: Run, program: Path, tmp_path: Path, cut: int) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(program.read_bytes()[:-cut])
    broken.chmod(0o755)
    ended = run(executable=broken)
    assert ended.returncode == 1
    assert ended.stderr == "error: this executable is not whole\nhint: fetch it again\n"


def test_a_damaged_download_is_said_and_leaves_nothing(run: Run, program: Path, tmp_path: Path) -> None:
    damaged = bytearray(program.read_bytes())
    damaged[-100] ^= 0xFF
    (tmp_path / "damaged").write_bytes(damaged)
    (tmp_path / "damaged").chmod(0o755)
    ended = run(executable=tmp_path / "damaged")
    assert ended.returncode == 1
    assert ended.stderr == "error: this executable is damaged\nhint: fetch it again\n"
    assert unpacked(tmp_path) == []


def test_its_folders_are_its_owners(run: Run, tmp_path: Path) -> None:
    run(umask=0)
    folders = [path for path in (tmp_path / ".cache").rglob("*") if path.is_dir()]
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o022 for path in folders)


def test_a_umask_holds_for_folders_above_and_what_is_started_alone(run: Run, tmp_path: Path) -> None:
    tells = packed(tmp_path, "#!/bin/sh\numask\n", beside="x")
    assert run(executable=tells, umask=0o077).stdout == "0077\n"
    assert stat.S_IMODE((tmp_path / ".cache/mlxcel").stat().st_mode) == 0o700
    inside = [path for path in (tmp_path / ".cache/mlxcel/binary").rglob("*") if path.name != ".lock"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in inside)
    assert stat.S_IMODE((tmp_path / ".cache/mlxcel/binary").stat().st_mode) == 0o755


def test_it_needs_nothing_of_the_system(program: Path) -> None:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    assert "not a dynamic executable" in said.stdout + said.stderr or "statically linked" in said.stdout
