"""Device types and counts: what `--devices 8xA100-40GB` means."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from planner.errors import PlanError

GB = 10**9
GiB = 2**30


@dataclass(frozen=True)
class DeviceSpec:
    """Describe one device type: memory in bytes, the share of it a step may use, devices a host, attention
    kernel, whether it multiplies fp8 numbers, multiprocessors if the fused kernel serves it.
    """

    name: str
    memory_bytes: int
    usable: float = 0.92  # the rest: CUDA context, NCCL buffers, fragmentation
    node_size: int = 8
    attention: str = "cudnn"
    max_degree: int = 8
    cores: int = 0  # of a CPU
    fp8: bool = True
    fused: int = 0  # multiprocessors that share a fused product's tiles; 0: no such kernel

    @property
    def limit_bytes(self) -> int:
        """Return the bytes a step may use on each device."""
        return int(self.memory_bytes * self.usable)


@dataclass(frozen=True)
class Devices:
    """Hold a number of equal devices."""

    spec: DeviceSpec
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 100_000:
            raise PlanError(f"{self.count} devices: the count must be between 1 and 100000")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the sizes a device group may have: powers of two within a host and within the count."""
        top = min(self.count, self.spec.max_degree, self.spec.node_size)
        return tuple(2**i for i in range(top.bit_length()) if 2**i <= top)

    @property
    def parts(self) -> "tuple[Devices, ...]":
        """Return the devices type by type: themselves."""
        return (self,)

    def type_of(self, device: int) -> DeviceSpec:
        """Return the type of a device by its number."""
        return self.spec

    def __str__(self) -> str:
        """Write what there is: 8 × A100-40GB."""
        return f"{self.count} × {self.spec.name}"


@dataclass(frozen=True)
class Mixture:
    """Hold devices of several types, numbered one type after another; no device group spans two types."""

    parts: tuple[Devices, ...]

    def __post_init__(self) -> None:
        names = [part.spec.name for part in self.parts]
        if len(set(names)) < len(names) or len(names) < 2:
            raise PlanError(
                f"a mixture of {', '.join(names) or 'nothing'}: two or more different types are needed"
            )
        if "cpu" in names:
            raise PlanError(f"devices {self}: a CPU cannot be mixed with other devices")

    @property
    def count(self) -> int:
        """Count the devices of all types."""
        return sum(part.count for part in self.parts)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Return the number of each type's first device."""
        return tuple(accumulate((part.count for part in self.parts[:-1]), initial=0))

    def type_of(self, device: int) -> DeviceSpec:
        """Return the type of a device by its number."""
        return next(
            part.spec
            for part, first in zip(self.parts, self.firsts, strict=True)
            if first <= device < first + part.count
        )

    def __str__(self) -> str:
        """Write what there is: 4 × A100-40GB + 4 × H200."""
        return " + ".join(map(str, self.parts))


# Memory as nvidia-smi reports it (MiB · 2^20), rounded down.
DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec("A100-40GB", 40_960 * 2**20, fp8=False),
        DeviceSpec("A100-80GB", 81_920 * 2**20, fp8=False),
        DeviceSpec("H100", 81_559 * 2**20, fused=132),
        DeviceSpec("H200", 143_771 * 2**20, fused=132),
        DeviceSpec("B200", 183_359 * 2**20),
        DeviceSpec("A10", 23_028 * 2**20, fp8=False),
        DeviceSpec("L40S", 46_068 * 2**20),
        DeviceSpec("RTX4090", 24_564 * 2**20),
        DeviceSpec("RTX5090", 32_607 * 2**20),
    )
}
ALIASES = {
    "A100": "A100-40GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB", "A100-40G": "A100-40GB",
    "A100-80G": "A100-80GB", "H100-80GB": "H100",
    "H200-141GB": "H200", "A10-24GB": "A10", "A10G": "A10", "RTX-4090": "RTX4090", "4090": "RTX4090",
    "RTX-5090": "RTX5090", "5090": "RTX5090",
}  # fmt: skip


def device_spec(name: str) -> DeviceSpec:
    """Return a device type by name, in any letter case.

    Raises:
        PlanError: the name is not known; the message lists those that are.
    """
    key = name.strip().upper().replace("_", "-").replace(" ", "-").removeprefix("NVIDIA-")
    if key.startswith("CPU"):
        match = re.fullmatch(r"CPU(?:-(\d+(?:\.\d+)?)GI?B)?", key)
        if match:
            return cpu_device(int(float(match.group(1) or 16) * GB)).spec
    key = ALIASES.get(key, key)
    if key not in DEVICES:
        raise PlanError(f"device {name!r} is not known; allowed: {', '.join(DEVICES)}, or cpu-16GB")
    return DEVICES[key]


def devices(text: str) -> Devices | Mixture:
    """Parse `8xA100-40GB`, `H200` or `cpu-16GB` into devices, and `4xA100-40GB+4xH200` into a mixture.

    Raises:
        PlanError: the text has another form, or names an unknown device.
    """
    found = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[xX×*]\s*)?([A-Za-z0-9][\w .-]*?)\s*", part)
        if not match:
            raise PlanError(
                f"devices {text!r}: write COUNTxTYPE, for example 8xA100-40GB, 4xA100-40GB+4xH200 or cpu-16GB"
            )
        found.append(Devices(device_spec(match.group(2)), int(match.group(1) or 1)))
    return mix(found)


def mix(parts: Iterable[Devices]) -> Devices | Mixture:
    """Put devices together, those of one type under the least memory that any of them has."""
    found: dict[str, Devices] = {}
    for part in parts:
        same = found.get(part.spec.name)
        spec = min((same or part).spec, part.spec, key=lambda spec: spec.limit_bytes)
        found[spec.name] = Devices(spec, part.count + (same.count if same else 0))
    return next(iter(found.values())) if len(found) == 1 else Mixture(tuple(found.values()))


def devices_from(raw: Mapping[str, Any]) -> Devices | Mixture:
    """Read devices, or a mixture, from what `dataclasses.asdict` made of them."""
    if "parts" in raw:
        return Mixture(tuple(Devices(DeviceSpec(**part["spec"]), part["count"]) for part in raw["parts"]))
    return Devices(DeviceSpec(**raw["spec"]), raw["count"])


def cpu_device(memory_bytes: int, cores: int = 1) -> Devices:
    """Make a plan's device from this machine's memory: the limit is four fifths of it, one device in all."""
    if memory_bytes < 64 * 2**20:
        raise PlanError(f"{memory_bytes} bytes of memory: too little to train anything")
    return Devices(DeviceSpec("cpu", memory_bytes, 0.8, 1, "xla", 1, cores), 1)
