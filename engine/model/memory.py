"""How many bytes this process may still take, and how to say such a number.

Reads what the operating system tells; it knows nothing of models. On Linux a control group's limit counts as
well as the machine's own memory, since a container is killed at the first of the two.
"""

import os
import re
import subprocess
from pathlib import Path

UNLIMITED_BYTES = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken before something is swapped out or killed. `root` is where /proc and /sys are."""
    machine = _linux_bytes(root) or _mac_bytes() or _sysconf_bytes()
    return max(0, min(machine, _control_group_bytes(root)))


def human_bytes(count: int) -> str:
    """`count` in decimal units with three digits at most: 538 MB, 1.2 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _linux_bytes(root: Path) -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _mac_bytes() -> int:
    """Free, inactive, speculative and purgeable pages, as `vm_stat` reports them; 0 where there is none."""
    try:
        said = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return _parse_vm_stat(said)


def _parse_vm_stat(said: str) -> int:
    page = re.search(r"page size of (\d+) bytes", said)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", said, re.MULTILINE)
    return sum(map(int, pages)) * int(page[1]) if page else 0


def _sysconf_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _control_group_bytes(root: Path) -> int:
    """What the tightest limit among this process's control groups and their parents leaves (versions 1 and 2)."""
    left = UNLIMITED_BYTES
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            left = min(left, _left_in(folder, limit, usage))
            if folder == base:
                break
    return left


def _left_in(folder: Path, limit_file: str, usage_file: str) -> int:
    limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= UNLIMITED_BYTES:
        return UNLIMITED_BYTES
    return int(limit) - int(usage) + _reclaimable_bytes(folder)


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that the group is charged for and gives back under pressure."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
