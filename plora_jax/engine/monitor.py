"""What a process uses: memory of host and devices, utilisation of GPUs; and whether steps take as long as planned."""

import os
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

from plora_jax.machine import memory_bytes

MIN_STEPS, RECENT = 8, 128  # micro-steps that tell the pace of a pack, and that are remembered for it


def sample(devices: Sequence[Any] = ()) -> dict[str, Any]:
    """Measure this process and its GPUs, in about a millisecond.

    Args:
      devices: the JAX devices whose allocator is asked; JAX is not touched without them.

    Returns:
      `host_rss_bytes` and `host_free_bytes`; `device_bytes`, `device_peak_bytes` and `device_limit_bytes`, each of the
      fullest of `devices`, where JAX counts them (not on a CPU); `gpus`, where NVML is installed and finds those in
      CUDA_VISIBLE_DEVICES: a list of `{"uuid", "memory_bytes", "memory_limit_bytes", "utilisation"}`, memory as all
      processes use it and utilisation from 0 to 1, or `{"uuid", "error"}` of one that no longer answers.
    """
    out: dict[str, Any] = {"host_rss_bytes": resident_bytes(), "host_free_bytes": memory_bytes()}
    stats = [found for device in devices if (found := device.memory_stats())]
    if stats:
        fullest = max(stats, key=lambda found: found.get("bytes_in_use", 0))
        names = {"bytes_in_use": "device_bytes", "peak_bytes_in_use": "device_peak_bytes"}
        names["bytes_limit"] = "device_limit_bytes"
        out |= {ours: int(fullest[name]) for name, ours in names.items() if name in fullest}
    if gpus := [_gpu(uuid, handle) for uuid, handle in _handles()]:
        out["gpus"] = gpus
    return out


def resident_bytes() -> int:
    """Return the memory that this process holds in RAM; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@cache
def _nvml() -> Any:
    """Return NVML's Python module, started; None where it, or the driver, is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@cache
def _handles() -> tuple[tuple[str, Any], ...]:
    """Return UUID and handle of each GPU in CUDA_VISIBLE_DEVICES; of all where it is not set."""
    nvml, asked = _nvml(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if nvml is None:
        return ()
    found = []
    try:
        if asked is None:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        else:
            names = [name.strip() for name in asked.split(",") if name.strip()]
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            handles = [by_index(int(name)) if name.isdecimal() else by_uuid(name) for name in names]
        found = [(_text(nvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]
    except nvml.NVMLError:
        return ()
    return tuple(found)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _gpu(uuid: str, handle: Any) -> dict[str, Any]:
    nvml = _nvml()
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError as error:
        return {"uuid": uuid, "error": str(error)}
    used = {"memory_bytes": int(memory.used), "memory_limit_bytes": int(memory.total)}
    return {"uuid": uuid, **used, "utilisation": busy}


class Pace:
    """Compare the micro-steps of one pack with the seconds that its plan gives each of them."""

    def __init__(self, planned_s: float) -> None:
        self.planned_s = planned_s
        self._compiled: set[Hashable] = set()
        self._recent: deque[tuple[Hashable, float]] = deque(maxlen=RECENT)

    def add(self, shape: Hashable, waited: Hashable | None, seconds: float) -> None:
        """Take in the time of dispatching a micro-step of `shape` and waiting for the one before, of shape `waited`.

        None waited for says nothing of a step; nor does the first of a shape, which compiles it.
        """
        if waited is not None and shape in self._compiled:
            self._recent.append((waited, seconds))
        self._compiled.add(shape)

    def factor(self) -> float | None:
        """Return by what factor micro-steps take longer than planned, None before MIN_STEPS are known.

        It is the mean over the last RECENT, each taken as the median of its shape, so that a pause of the machine
        does not count.
        """
        if len(self._recent) < MIN_STEPS:
            return None
        times: dict[Hashable, list[float]] = {}
        for shape, seconds in self._recent:
            times.setdefault(shape, []).append(seconds)
        total = sum(len(found) * statistics.median(found) for found in times.values())
        return total / len(self._recent) / self.planned_s
