"""What a sweep runs on: the launcher, the devices and cores of each worker, and the devices to plan for."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Literal, NamedTuple

import planner
from plora_jax.errors import UserError
from plora_jax.launch.pool import Launcher, Pool
from plora_jax.launch.process import Group
from plora_jax.machine import Gpu, cores, gpus, memory_bytes, visible_gpus
from plora_jax.planning import find_devices, gpu_spec

BUSY = 0.1  # share of a GPU's memory which, when other programs use it, leaves the GPU out
CONTEXT_MIB = 1536  # of a GPU's memory for CUDA's context and libraries, which JAX does not count


@dataclass(frozen=True)
class LaunchOptions:
    """Hold what the command line says on where workers run; "inline" is in the driver's own process."""

    launcher: Literal["local", "ray", "slurm", "inline"] = "local"
    workers: int | None = None  # None: one for each GPU; one on a CPU
    ray_address: str = ""  # empty: $RAY_ADDRESS, else a Ray of this machine's own
    slurm: str = ""  # options of sbatch, as one would type them


class Site(NamedTuple):
    """Hold what a sweep runs on; `note` is for people: what was left out, and why the CPU when it is the CPU.

    There is no launcher for "inline": the caller runs the one worker itself.
    """

    launcher: Launcher | None
    groups: list[Group]
    devices: planner.Devices | planner.Mixture
    note: str = ""


def find_site(options: LaunchOptions, devices: str, *, held: int | None = None) -> Site:
    """Find what a sweep with `devices` (as in SWEEP.yaml) runs on; it is planned with a device a pack, as workers run.

    Args:
      held: bytes of its GPU that JAX may use in this process, which already does; for "inline" alone.

    Raises:
      UserError: the devices that are asked for are not there, or more workers are asked for than there are devices.
    """
    site = _site(options, devices, held)
    parts = site.devices.parts  # a worker runs packs on one device: see docs/cluster.md
    alone = [replace(part, spec=replace(part.spec, max_degree=1)) for part in parts]
    return site._replace(devices=planner.mix(alone))


def _site(options: LaunchOptions, devices: str, held: int | None) -> Site:
    if options.launcher == "ray":
        from plora_jax.launch.ray import ray_site

        return ray_site(options, devices)
    if options.launcher == "slurm":
        from plora_jax.launch.slurm import slurm_site

        return slurm_site(options, devices)
    if options.launcher == "inline":
        if options.workers not in (None, 1):
            raise UserError(f"--workers {options.workers}: with --launcher inline there is one")
        return local_site(devices, 1, held)._replace(launcher=None)
    return local_site(devices, options.workers)


def local_site(devices: str, workers: int | None = None, held: int | None = None) -> Site:
    """Share this machine among workers: a GPU each, or, without GPUs, cores; every worker has cores of its own.

    GPUs of types that are not asked for, and those that other programs use, are left out. Workers of one type are
    numbered after those of another, as the plan's devices are. `held` is as in `find_site`: such a GPU is in use by
    this process, and that much of it is there to plan with.

    Raises:
      UserError: as `find_site`.
    """
    asked = None if devices in ("auto", "cpu") else find_devices(devices)
    on_cpu = devices == "cpu" or (asked is not None and asked.parts[0].spec.name == "cpu")
    found, why = ([], "") if on_cpu else _usable_gpus()
    if found:
        if held is not None:
            site = _gpu_site([found[0]._replace(used_mib=0)], devices, asked, workers)
            spec = site.devices.parts[0].spec
            spec = replace(spec, memory_bytes=min(spec.memory_bytes, int(held / spec.usable)))
            return site._replace(devices=planner.Devices(spec, 1))
        return _gpu_site(found, devices, asked, workers)
    if not on_cpu and asked:
        raise UserError(f"devices: {devices} is asked for, but {why}; devices: auto runs on the CPU")
    count = workers or (asked.count if asked else 1)
    if count > cores():
        raise UserError(f"--workers {count}: this process may use {cores()} CPU cores; give at most as many")
    spec = (asked or find_devices("cpu")).parts[0].spec
    if not asked:
        spec = replace(spec, memory_bytes=memory_bytes() // count)
    spec = replace(spec, cores=cores() // count)
    groups = [Group(str(i), cores=own, threads=len(own)) for i, own in enumerate(core_shares(count))]
    note = f"{why}: running on the CPU" if why else ""
    return Site(Pool(), groups, planner.Devices(spec, count), note)


def _gpu_site(
    found: Sequence[Gpu],
    devices: str,
    asked: planner.Devices | planner.Mixture | None,
    workers: int | None,
) -> Site:
    kinds = list(dict.fromkeys(gpu.name for gpu in found))
    types = [part.spec.name for part in asked.parts] if asked else [gpu_spec(gpu).name for gpu in found]
    if missing := [name for name in types if all(gpu_spec(gpu).name != name for gpu in found)]:
        raise UserError(
            f"devices: {devices} is asked for, but this machine has {' and '.join(kinds)}, no {missing[0]}; use auto"
        )
    free: dict[str, list[Gpu]] = {name: [] for name in types}
    notes = []
    for gpu in found:
        used, total = gpu.used_mib / 1024, gpu.memory_mib / 1024
        if gpu_spec(gpu).name not in free:
            notes.append(f"{gpu.uuid} is left out: it is a {gpu.name}, and {devices} is asked for")
        elif gpu.used_mib > BUSY * gpu.memory_mib:
            notes.append(f"{gpu.uuid} is left out: other programs use {used:.0f} of its {total:.0f} GiB")
        else:
            free[gpu_spec(gpu).name].append(gpu)
    counts = {part.spec.name: part.count for part in asked.parts} if asked else {}
    if workers and len(counts) > 1 and workers != sum(counts.values()):
        raise UserError(f"--workers {workers}: devices: {devices} says how many of each type there are")
    if workers and len(counts) == 1:
        counts = dict.fromkeys(counts, workers)
    there = [gpu for own in free.values() for gpu in own]
    chosen = [gpu for name, own in free.items() for gpu in own[: counts.get(name, len(own))]]
    if workers and not asked:
        chosen = there[:workers]
    count = workers or sum(counts.values()) or len(chosen) or 1
    if count > len(chosen):
        what = f"--workers {workers}" if workers else f"devices: {devices}"
        here = f"{len(found)} GPU{'s' if len(found) > 1 else ''} here, {len(there)} of them free"
        raise UserError("; ".join([f"{what}: {here}", *notes]))
    groups = [
        Group(str(i), 1, (gpu.uuid,), own, len(own), _fraction(gpu))
        for i, (gpu, own) in enumerate(zip(chosen, core_shares(len(chosen)), strict=True))
    ]
    on = planner.mix(planner.Devices(gpu_spec(gpu), 1) for gpu in chosen)
    if isinstance(on, planner.Mixture):
        notes.insert(0, f"on {on}: a worker takes packs that are planned for its own type")
        taken = {gpu.name: gpu_spec(gpu).name for gpu in chosen}
        notes += [
            f"a {name} is planned as a {kind}"
            for name, kind in taken.items()
            if kind.split("-")[0] not in name
        ]
    return Site(Pool(lost=_lost_gpu), groups, on, "; ".join(notes))


def _usable_gpus() -> tuple[list[Gpu], str]:
    """List the GPUs that JAX can use here; when there are none, say why."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return [], "JAX_PLATFORMS=cpu is set"
    there, visible = gpus(), visible_gpus()
    if not there:
        return [], "no NVIDIA GPU was found"
    if not visible:
        return [], f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names none of the GPUs here"
    if not any("cuda" in point.name for point in entry_points(group="jax_plugins")):
        return [], "JAX's CUDA build is not installed for the GPUs here (pip install 'plora-jax[cuda]')"
    return visible, ""


def _lost_gpu(group: Group) -> str:
    """Say which of a worker's GPUs the driver no longer finds."""
    there = {gpu.uuid for gpu in gpus()}
    gone = [uuid for uuid in group.devices if uuid not in there]
    return f"the driver no longer finds {', '.join(gone)}" if gone else ""


def _fraction(gpu: Gpu) -> float:
    """Return the share of a GPU's memory for JAX to take: what is free but for CUDA's own needs."""
    return min(0.95, 1 - (gpu.used_mib + CONTEXT_MIB) / gpu.memory_mib)


def core_shares(count: int) -> list[tuple[int, ...]]:
    """Deal the cores this process may use out to `count` workers, as many to each; where there are fewer, all share.

    They are dealt in turns: hyperthreads of one core, numbered half of all apart, go to one worker.
    """
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(own) // count
    return [tuple(own[i : count * each : count]) if each else tuple(own) for i in range(count)]
