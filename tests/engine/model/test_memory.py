from pathlib import Path

import pytest

from engine.model.memory import _parse_vm_stat, available_bytes, human_bytes

GIB = 1 << 30


def machine(root: Path, available_kb: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 1024, "0::/\n")) == 1024 * 1024


def test_a_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB // 1024, "0::/box/inner\n")
    put(root / "sys/fs/cgroup/box/inner", memory__max="max\n", memory__current="5\n")
    put(root / "sys/fs/cgroup/box", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n")
    assert available_bytes(root) == GIB


def test_page_cache_in_the_group_counts_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB // 1024, "0::/\n")
    usage = {"memory__current": f"{2 * GIB}\n", "memory__stat": f"anon 1\ninactive_file {GIB}\n"}
    put(root / "sys/fs/cgroup", memory__max=f"{2 * GIB}\n", **usage)
    assert available_bytes(root) == GIB


def test_the_first_version_of_control_groups_is_read(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB // 1024, "3:cpu:/x\n4:memory:/box\n0::/\n")
    usage = {"memory__usage_in_bytes": f"{GIB}\n"}
    put(root / "sys/fs/cgroup/memory/box", memory__limit_in_bytes=f"{3 * GIB}\n", **usage)
    put(root / "sys/fs/cgroup/memory", memory__limit_in_bytes="9223372036854771712\n", **usage)
    assert available_bytes(root) == 2 * GIB


def test_this_machine_answers() -> None:
    assert available_bytes() > 1 << 20


def test_vm_stat_is_summed_in_its_own_page_size() -> None:
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:  10.\nPages active: 99.\n"
        "Pages inactive:  5.\nPages speculative: 1.\nPages wired down: 7.\nPages purgeable: 2.\n"
    )
    assert _parse_vm_stat(said) == 18 * 16384


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "2 kB"),
        (538_060_032, "538 MB"),
        (12_340_000, "12.3 MB"),
        (3e12, "3.0 TB"),
    ],
)
def test_sizes_are_said_in_three_digits(count: int, said: str) -> None:
    assert human_bytes(int(count)) == said
