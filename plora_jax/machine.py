"""What this machine has: memory, cores and GPUs, found without JAX and without waiting."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """Hold one GPU as the driver names it, and its memory in MiB."""

    name: str
    memory_mib: int
    driver: str


def cores() -> int:
    """Count the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory this process may still take: what is available, within the control group's limit."""
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = meminfo.get("MemAvailable", "").split()
    if available:
        limits = [int(available[0]) * 1024]
    else:  # not Linux
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if _read(limit).strip().isdigit() and _read(used).strip().isdigit():
            limits.append(max(int(_read(limit)) - int(_read(used)), 0))
    return min(limits)


def gpus() -> list[Gpu]:
    """List the GPUs that the NVIDIA driver reports; none where there is no driver."""
    command = shutil.which("nvidia-smi")
    if not command:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [Gpu(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
