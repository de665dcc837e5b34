"""Run workers on a Ray cluster: an actor each, which holds the resources and starts the worker's process on its node.

Ray finds the nodes and tells when one is lost; the worker that was on it is started again where there is room. The run
directory must be one that all nodes share.
"""

import fcntl
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import planner
from plora_jax.errors import UserError
from plora_jax.launch.pool import Pool
from plora_jax.launch.process import WORKER, Exit, Group, WorkerProcess
from plora_jax.launch.site import LaunchOptions, Site

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    raise UserError("--launcher ray: Ray is not installed; pip install 'plora-jax[ray]'") from None

ANSWER_S = 10.0  # for a cluster's head to accept a connection
SEEN_S = 15.0  # for what the driver wrote to be seen on a node; NFS may keep an older view this long


def ray_site(options: LaunchOptions, devices: str) -> Site:
    """Connect to a Ray cluster, or start one on this machine, and share it among workers: a GPU each, or CPUs.

    Raises:
      UserError: the cluster cannot be reached, or does not have the devices.
    """
    address = options.ray_address or os.environ.get("RAY_ADDRESS", "")
    _connect(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    there = int(sum(node.get("GPU", 0) for node in nodes))
    asked = None if devices in ("auto", "cpu") else _parse(devices)
    where = f"the Ray cluster at {address}" if address else "Ray on this machine"
    if devices == "cpu" or (asked and asked.parts[0].spec.name == "cpu") or (devices == "auto" and not there):
        return _cpu_site(nodes, options.workers or (asked and asked.count) or len(nodes), where)
    kinds = _gpu_kinds(nodes)
    if asked is None:
        asked = _all_gpus(kinds, there, where)
    if options.workers and isinstance(asked, planner.Mixture):
        raise UserError(
            f"--workers {options.workers}: there are several types of GPUs; say how many of each in devices"
        )
    cpus = min((int(node["CPU"] // node["GPU"]) for node in nodes if node.get("GPU")), default=1)
    parts = [planner.Devices(part.spec, options.workers or part.count) for part in asked.parts]
    several = len(kinds) > 1 or len(parts) > 1
    names = _names([part.spec for part in parts], nodes, where) if several else [""]
    named = [kind for kind, part in zip(names, parts, strict=True) for _ in range(part.count)]
    groups = [Group(str(i), 1, threads=max(cpus, 1), kind=kind) for i, kind in enumerate(named)]
    short = len(groups) - there
    note = f"{where} has {there} GPUs now: {short} workers wait for more" if short > 0 else f"on {where}"
    return Site(ray_pool(), groups, planner.mix(parts), note)


def _cpu_site(nodes: list[dict[str, float]], count: int, where: str) -> Site:
    each = -(-count // len(nodes))  # workers a node, at most
    threads = int(min(node["CPU"] for node in nodes)) // each
    if threads < 1:
        raise UserError(f"--workers {count}: {where} has {len(nodes)} nodes of few CPUs; give fewer workers")
    memory = int(min(node.get("memory", 0) for node in nodes)) // each
    spec = planner.cpu_device(memory, threads).spec
    groups = [Group(str(i), threads=threads) for i in range(count)]
    return Site(ray_pool(), groups, planner.Devices(spec, count), f"on the CPUs of {where}")


def _types(node: dict[str, float]) -> set[str]:
    """Return the types of a node's GPUs, as Ray names them: what it found, and what the node was started with."""
    prefix = "accelerator_type:"
    return {name.removeprefix(prefix) for name in node if name.startswith(prefix)}


def _gpu_kinds(nodes: list[dict[str, float]]) -> Counter[str]:
    """Count the cluster's GPUs by their types, each under the longest of its names: A100-80G, and not A100."""
    kinds = Counter[str]()
    for node in nodes:
        if names := _types(node):
            kinds[max(names, key=len)] += int(node.get("GPU", 0))
    return kinds


def _all_gpus(kinds: Counter[str], there: int, where: str) -> planner.Devices | planner.Mixture:
    """Return all GPUs of the cluster.

    Raises:
      UserError: Ray does not name the types of all of them.
    """
    if kinds and kinds.total() == there:
        return planner.mix(part for kind, count in kinds.items() for part in _parse(f"{count}x{kind}").parts)
    found = ", ".join([*kinds, "GPUs of a type that Ray does not name"])
    raise UserError(f"devices: auto: {where} has {found}; name them, such as 8xA100-40GB")


def _names(specs: Sequence[planner.DeviceSpec], nodes: list[dict[str, float]], where: str) -> list[str]:
    """Return Ray's name of each device type, by which a worker is placed on a GPU of it.

    Raises:
      UserError: Ray names no such GPU, or the name of one type would do for a GPU of another.
    """
    kinds, out = _gpu_kinds(nodes), []
    for spec in specs:
        alike = [kind for kind in kinds if kind.upper() == spec.name.split("-")[0]]  # A100 of either memory
        found = [kind for kind in kinds if _is_named(spec, kind)] + alike
        if not found:
            raise UserError(
                f"devices: {where} names {', '.join(kinds) or 'no types'} and no {spec.name}: workers could not be "
                "placed on the right GPUs"
            )
        out.append(found[0])
    for (one, first), (two, second) in combinations(zip(specs, out, strict=True), 2):
        if any({first, second} <= _types(node) for node in nodes):
            raise UserError(
                f"devices: {where} calls GPUs of both {one.name} and {two.name} {min(first, second, key=len)}: workers "
                "could not be placed on the right GPUs; name one of them, or start the nodes with a name for each"
            )
    return out


def _is_named(spec: planner.DeviceSpec, kind: str) -> bool:
    try:
        return planner.devices(kind).parts[0].spec == spec
    except planner.PlanError:
        return False


def _parse(devices: str) -> planner.Devices | planner.Mixture:
    try:
        return planner.devices(devices)
    except planner.PlanError as error:
        raise UserError(f"devices: {error}") from None


def _connect(address: str) -> None:
    """Connect to Ray, and leave the handling of signals as it was: Ray would end the driver on SIGTERM at once."""
    if ray.is_initialized():
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        options = {"address": address} if address else {"address": "local", "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error).strip() or "no answer"
        raise UserError(f"--ray-address {address}: {text.splitlines()[0]}") from None
    finally:
        for number, handler in zip(numbers, before, strict=True):
            try:
                signal.signal(number, handler)
            except ValueError:  # not the main thread
                break


class _Node:
    """Hold a worker's resources on its node, and the worker's process."""

    def __init__(self, run: str, group: Group, module: str) -> None:
        self.run, self.group, self.module = Path(run), group, module
        self.process: WorkerProcess | None = None
        self.asked = False

    def work(self) -> Exit:
        """Start the worker and wait for its end."""
        if why := not_shared(self.run):
            return Exit(why, "", started=False)
        self.process = WorkerProcess(self.run, self.group, self.module)
        while (ended := self.process.poll()) is None:
            time.sleep(0.1)
        return ended

    def placed(self) -> bool:
        """Answer, once there is a node for the worker."""
        return True

    def terminate(self) -> None:
        """Ask the worker to save and to end."""
        if self.process:
            self.process.terminate()


class RayWorker:
    """Run one worker somewhere on the cluster, where its CPUs and GPUs are free."""

    def __init__(self, run: Path, group: Group, module: str = WORKER) -> None:
        kind = (
            {f"accelerator_type:{group.kind}": 0.001} if group.kind else {}
        )  # as Ray itself asks for a type
        actor: Any = ray.remote(num_gpus=group.gpus, num_cpus=group.threads or 1, resources=kind)(_Node)
        self.actor = actor.options(max_restarts=0, max_concurrency=3).remote(
            str(run.absolute()), group, module
        )
        self.placed = self.actor.placed.remote()
        self.ended = self.actor.work.remote()
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """Return how the worker ended, None while it runs or waits for a node."""
        if self._exit is None and ray.wait([self.ended], timeout=0)[0]:
            try:
                self._exit = ray.get(self.ended)
            except RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self._exit = Exit(f"lost with its node: {lines[0] if lines else error!r}", "", started=True)
            ray.kill(self.actor)  # lets go of its resources
        return self._exit

    def terminate(self) -> None:
        """Ask the worker to save and to end; one that has no node yet ends at once."""
        if ray.wait([self.placed], timeout=0)[0]:
            self.actor.terminate.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """End the worker at once, with the process on its node that started it."""
        ray.kill(self.actor)


def ray_pool(module: str = WORKER, **options: Any) -> Pool:
    """Return the launcher of workers on the connected cluster."""
    spawn: Callable[[Path, Group], RayWorker] = partial(RayWorker, module=module)
    return Pool(spawn, **options)


def not_shared(run: Path, wait_s: float = SEEN_S) -> str:
    """Say why the driver's run directory is not usable on this node, empty when it is.

    The driver holds the lock of the run: a node must see the file, and must see that it is locked. Where it does not,
    two workers would take the same pack.
    """
    lock, node = run / ".lock", os.uname().nodename
    deadline = time.monotonic() + wait_s
    while not lock.exists():
        if time.monotonic() > deadline:
            return f"node {node} does not see {run}: give --out on a file system that all nodes share"
        time.sleep(0.2)
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return (
                f"node {node} cannot lock files in {run} ({error.strerror}): mount it with file locks (flock)"
            )
    return (
        f"node {node} does not see the driver's lock in {run}: this is another directory of the same name, or a file "
        "system whose locks do not reach other machines; share the directory, or mount it with flock"
    )
