"""What a process uses, against the system's own numbers; departures of step times from the plan."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from plora_jax.engine import monitor
from plora_jax.engine.monitor import StepTime, drift, resident_bytes, sample


def test_resident_memory_follows_what_is_held():
    before = resident_bytes()
    block = np.ones(200 * 2**20, np.uint8)
    grown = resident_bytes() - before
    assert 0.95 * block.nbytes < grown < 1.2 * block.nbytes
    assert resident_bytes() <= 1.01 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_without_gpus_nothing_is_said_of_them():
    code = "import sys; from plora_jax.engine.monitor import sample; print(sorted(sample()), 'jax' in sys.modules)"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "['host_free_bytes', 'host_rss_bytes'] False\n", done.stderr


def test_the_fullest_device_counts():
    def device(used, **more):
        return SimpleNamespace(memory_stats=lambda: {"bytes_in_use": used, "bytes_limit": 100, **more})

    cpu = SimpleNamespace(memory_stats=lambda: None)
    out = sample([device(7, peak_bytes_in_use=9), device(30, peak_bytes_in_use=31), device(2)])
    assert {name: out[name] for name in out if name.startswith("device")} == {
        "device_bytes": 30,
        "device_peak_bytes": 31,
        "device_limit_bytes": 100,
    }
    assert not [name for name in sample([cpu]) if name.startswith("device")]


class Nvml:
    """NVML's calls as its reference names them, on two GPUs of which the second has fallen off the bus."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return ["GPU-a", "GPU-b"].index(uuid)

    def nvmlDeviceGetUUID(self, handle):
        return [b"GPU-a", "GPU-b"][handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == 1:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(used=5, total=9, free=4)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=93, memory=1)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, ["GPU-a", "GPU-b"]), ("GPU-b", ["GPU-b"]), ("1,0", ["GPU-b", "GPU-a"]), ("", []), ("7", [])],
)
def test_gpus_as_nvml_tells(monkeypatch, visible, uuids):
    monkeypatch.setattr(monitor, "_nvml", Nvml)
    monitor._handles.cache_clear()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = sample().get("gpus", [])
    monitor._handles.cache_clear()
    assert [gpu["uuid"] for gpu in found] == uuids
    whole = {"uuid": "GPU-a", "memory_bytes": 5, "memory_limit_bytes": 9, "utilisation": 0.93}
    for gpu in found:
        assert gpu == (whole if gpu["uuid"] == "GPU-a" else {"uuid": "GPU-b", "error": "GPU is lost"})


def steps(ratio, count=40, compile_s=30.0, shapes=2):
    """Micro-steps of several shapes, the first of each compiled, that take `ratio` of their planned times."""
    planned = {shape: 0.1 * (1 + shape) for shape in range(shapes)}
    first = [StepTime(shape, planned[shape], compile_s) for shape in range(shapes)]
    return first + [
        StepTime(i % shapes, planned[i % shapes], ratio * planned[i % shapes]) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("ratio", "found"), [(1.0, None), (1.09, None), (0.91, None), (1.12, 1.12), (2.0, 2.0), (0.5, 0.5)]
)
def test_drift_of_more_than_a_tenth(ratio, found):
    assert drift(steps(ratio)) == (None if found is None else pytest.approx(found))


def test_neither_compilation_nor_a_pause_is_drift():
    assert drift(steps(1.0, count=8, shapes=8)) is None  # half of all steps compiled
    paused = steps(1.0)
    paused[10:25] = [step._replace(measured_s=20.0) for step in paused[10:25]]
    assert drift(paused) is None


def test_a_few_steps_say_nothing_and_old_ones_are_forgotten():
    assert drift([]) is None and drift(steps(3.0, count=7)) is None
    assert drift(steps(3.0, count=8)) == pytest.approx(3.0)
    assert drift(steps(3.0, count=100) + steps(1.0, count=70)[2:]) is None
