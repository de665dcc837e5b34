"""What this machine has: memory, cores and GPUs, found without JAX and without waiting."""

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """Hold one GPU as the driver names it, and its memory in MiB, the part in use by any program too."""

    name: str
    memory_mib: int
    driver: str
    uuid: str = ""
    used_mib: int = 0


def cores() -> int:
    """Count the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("plora-jax", "jax", "jaxlib", "flax", "optax", "transformers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
    fields = "name,memory.total,driver_version,uuid,memory.used"
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        Gpu(name, int(total), driver, uuid, int(used) if used.isdigit() else 0)
        for name, total, driver, uuid, used in (row for row in rows if len(row) == 5)
        if total.isdigit()
    ]


def visible_gpus() -> list[Gpu]:
    """List the GPUs that CUDA_VISIBLE_DEVICES lets this process use, in its order; all where it is not set.

    As in CUDA, an entry that names no GPU hides itself and all that follow. Indices are the driver's.
    """
    found, asked = gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return found
    out: list[Gpu] = []
    for entry in (text.strip() for text in asked.split(",")):
        if entry.isdecimal() and int(entry) < len(found):
            gpu = found[int(entry)]
        else:
            named = [gpu for gpu in found if entry and gpu.uuid.startswith(entry)]
            if len(named) != 1:
                break
            gpu = named[0]
        if gpu in out:
            return []  # CUDA shows no GPU at all when one is named twice
        out.append(gpu)
    return out


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
