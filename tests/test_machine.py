"""GPUs as nvidia-smi tells them, and as it fails to."""

import sys
from pathlib import Path

import pytest

from plora_jax import machine, planning
from plora_jax.machine import Gpu, gpus, memory_bytes, versions, visible_gpus


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an nvidia-smi that runs this shell script first on the path."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "name,memory.total,driver_version,uuid,memory.used"
    rows = [f"NVIDIA H200, 143771, 580.95.05, GPU-1{end}" for end in ("a, 4", "b, 90000")]
    driver(folder, monkeypatch, f"[ $1 = --query-gpu={fields} ] && printf '{rows[0]}\\n{rows[1]}\\n'")


def test_gpus_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(tmp_path, monkeypatch)
    assert gpus() == [
        Gpu("NVIDIA H200", 143771, "580.95.05", "GPU-1a", 4),
        Gpu("NVIDIA H200", 143771, "580.95.05", "GPU-1b", 90000),
    ]
    devices = planning.find_devices("auto")
    assert (devices.spec.name, devices.count, devices.spec.memory_bytes) == ("H200", 2, 143771 * 2**20)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "echo 'A, [N/A], 1'", "exit 0"])
def test_a_driver_without_gpus(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, script)
    assert gpus() == []
    assert planning.find_devices("auto").spec.name == "cpu"


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ("1,0", ["GPU-1b", "GPU-1a"]),
        ("GPU-1b", ["GPU-1b"]),
        (" 1 ", ["GPU-1b"]),
        ("GPU-1", []),  # the beginning of two names
        ("0,-1,1", ["GPU-1a"]),
        ("2,0", []),
        ("0,0", []),
        ("", []),
        ("MIG-1a", []),
    ],
)
def test_cuda_visible_devices(
    asked: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # "CUDA Environment Variables" in NVIDIA's CUDA C++ programming guide
    two_gpus(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert [gpu.uuid for gpu in visible_gpus()] == seen


def test_memory_is_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": "6442450944\n",
        "/sys/fs/cgroup/memory.current": "2147483648\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert memory_bytes() == 4 * 2**30  # 6 GiB allowed, 2 in use
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory_bytes() == 8 * 2**30


def test_versions_are_those_that_run() -> None:
    import jax
    import numpy

    found = versions()
    assert found["jax"] == jax.__version__ and found["numpy"] == numpy.__version__
    assert found["python"] == sys.version.split()[0]
