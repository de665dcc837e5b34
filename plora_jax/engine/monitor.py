"""What a process uses: memory of host and devices, utilisation of GPUs; and whether steps take as long as planned."""

import os
import statistics
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

from plora_jax.machine import memory_bytes

DRIFT = 0.1  # departure of step times from the plan that is worth another plan
MIN_STEPS, RECENT = 8, 64


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


class StepTime(NamedTuple):
    """Hold one micro-step: its compiled shape, and the seconds it was planned to take and took."""

    shape: Hashable
    planned_s: float
    measured_s: float


def drift(steps: Sequence[StepTime], limit: float = DRIFT) -> float | None:
    """Return by what factor recent micro-steps take longer than planned, None when within `limit` or not known yet.

    It is the median of measured over planned time, so that a pause of the machine does not count; the first step of
    each shape, which compiles it, is left out. At least MIN_STEPS others are needed; the last RECENT count.
    """
    seen: set[Hashable] = set()
    ratios = []
    for step in steps:
        if step.shape in seen:
            ratios.append(step.measured_s / step.planned_s)
        seen.add(step.shape)
    if len(ratios) < MIN_STEPS:
        return None
    factor = statistics.median(ratios[-RECENT:])
    return factor if abs(factor - 1) > limit else None
