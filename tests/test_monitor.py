"""What a process uses, against the system's own numbers; how steps keep to the plan's times."""

import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from plora_jax.engine import monitor
from plora_jax.engine.monitor import Pace, resident_bytes, sample


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


def pace(ratio, count=40, compile_s=30.0, shapes=2, pauses=0):
    """Tell the pace of micro-steps of several lengths, the first of each compiled, planned at 0.15 s on average."""
    planned = [0.1 * 2 * (1 + shape) / (1 + shapes) * 1.5 for shape in range(shapes)]
    told, waited = Pace(0.15), None
    for i in range(count):
        shape = i % shapes
        seconds = ratio * planned[waited] if waited is not None else 0.001
        seconds += compile_s if i < shapes else 20.0 if i < shapes + pauses else 0.0
        told.add(shape, waited, seconds)
        waited = shape
    return told


@pytest.mark.parametrize("ratio", [1.0, 1.3, 0.5])
@pytest.mark.parametrize("shapes", [1, 2, 4])
def test_the_pace_is_that_of_the_mean_step(ratio, shapes):
    assert pace(ratio, count=20 * shapes + shapes, shapes=shapes).factor() == pytest.approx(ratio)


def test_neither_compilation_nor_a_pause_changes_the_pace():
    assert pace(1.0, shapes=1, pauses=15).factor() == pytest.approx(1.0)
    assert pace(1.0, shapes=1, count=9, compile_s=1e9).factor() == pytest.approx(1.0)


def test_a_few_steps_tell_no_pace_and_old_ones_are_forgotten():
    assert Pace(0.1).factor() is None and pace(3.0, count=8, shapes=1).factor() is None
    found = pace(3.0, count=9, shapes=1)
    assert found.factor() == pytest.approx(3.0)
    for _ in range(monitor.RECENT):
        found.add(0, 0, 0.15)
    assert found.factor() == pytest.approx(1.0)


def test_a_step_that_was_not_waited_for_tells_nothing():
    told = Pace(1.0)
    for _ in range(20):
        told.add(0, None, 1e-4)
    assert told.factor() is None
