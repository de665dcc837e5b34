"""Workers on a Ray cluster of several nodes on this machine, one of which is lost."""

import fcntl
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from plora_jax.engine.rundir import open_run  # noqa: E402
from plora_jax.errors import UserError  # noqa: E402
from plora_jax.launch import ray as launch_ray  # noqa: E402
from plora_jax.launch.pool import Restarts  # noqa: E402
from plora_jax.launch.ray import not_shared, ray_pool, ray_site  # noqa: E402
from plora_jax.launch.site import LaunchOptions, find_site  # noqa: E402
from tests.ray_cluster import ray_cluster  # noqa: E402
from tests.test_launch import pids  # noqa: E402
from tests.test_process import STANDIN, gone, status, wait_for  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes of two CPUs each."""
    with ray_cluster(2, 2) as (cluster, cluster_nodes):
        cluster.two = cluster_nodes
        yield cluster


MIXED = [
    {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0},
    {"CPU": 16.0, "GPU": 2.0, "accelerator_type:H200": 1.0},
    {"CPU": 4.0},
]


@pytest.fixture
def mixed(monkeypatch):
    """A cluster, told of and not there, whose nodes have other GPUs each."""
    nodes = [dict(node) for node in MIXED]
    monkeypatch.setattr(launch_ray, "_connect", lambda address: None)
    monkeypatch.setattr(launch_ray.ray, "nodes", lambda: [{"Alive": True, "Resources": n} for n in nodes])
    return nodes


def test_workers_are_placed_on_gpus_of_their_own_type(mixed):
    found = ray_site(LaunchOptions("ray"), "auto")
    assert str(found.devices) == "4 × A100-40GB + 2 × H200"
    assert [(group.worker, group.kind) for group in found.groups] == [
        (str(n), "A100" if n < 4 else "H200") for n in range(6)
    ]
    assert [part.degrees for part in find_site(LaunchOptions("ray"), "auto").devices.parts] == [(1,), (1,)]
    other = ray_site(LaunchOptions("ray"), "2xH200+1xA100-80GB")  # Ray says A100 of either memory
    assert str(other.devices) == "2 × H200 + 1 × A100-80GB"
    assert [group.kind for group in other.groups] == ["H200", "H200", "A100"]
    assert [group.kind for group in ray_site(LaunchOptions("ray", workers=3), "8xH200").groups] == [
        "H200"
    ] * 3
    del mixed[0]
    alike = ray_site(LaunchOptions("ray"), "8xH200")  # nothing to tell apart
    assert {group.kind for group in alike.groups} == {""} and alike.note.endswith("6 workers wait for more")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"A100"}, {"A100-80G"}),
        ({"A100", "A100-40G"}, {"A100", "A100-80G"}),  # Ray's own A100, and what the nodes were started with
    ],
)
def test_gpus_of_one_name_of_rays_are_told_apart_by_names_of_their_own(mixed, small, large, turned):
    for node, count, names in ((0, 4, small), (1, 3, large)):
        mixed[node] = {"CPU": 8.0, "GPU": float(count)} | {f"accelerator_type:{name}": 1.0 for name in names}
    if turned:
        mixed.reverse()
    one, two = (("A100-40GB", max(small, key=len)), ("A100-80GB", "A100-80G"))
    for devices in ("auto", "4xA100-40GB+3xA100-80GB", "3xA100-80GB+4xA100-40GB"):
        found = ray_site(LaunchOptions("ray"), devices)
        placed = [(found.devices.type_of(int(group.worker)).name, group.kind) for group in found.groups]
        assert sorted(placed) == [one] * 4 + [two] * 3
    [only] = {group.kind for group in ray_site(LaunchOptions("ray"), "2xA100-80GB").groups}
    assert only == "A100-80G"


def test_gpus_that_ray_cannot_tell_apart_are_refused(mixed):
    with pytest.raises(UserError, match="names A100, H200 and no L40S: workers could not be placed"):
        ray_site(LaunchOptions("ray"), "1xH200+1xL40S")
    with pytest.raises(UserError, match="names A100, H200 and no H100"):
        ray_site(LaunchOptions("ray"), "2xH100")
    both = "calls GPUs of both A100-80GB and A100-40GB A100: workers could not be placed"
    with pytest.raises(UserError, match=both):
        ray_site(LaunchOptions("ray"), "1xA100-80GB+1xH200+1xA100-40GB")
    large = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    mixed.append(large)  # on which an A100 of 40 GB would be taken to be too
    with pytest.raises(UserError, match=both):
        ray_site(LaunchOptions("ray"), "2xA100-80GB+1xA100-40GB")
    mixed.remove(large)
    with pytest.raises(UserError, match="--workers 3: there are several types of GPUs"):
        ray_site(LaunchOptions("ray", workers=3), "auto")
    del mixed[0]["accelerator_type:A100"]
    with pytest.raises(UserError, match=r"devices: auto: .* has H200, GPUs of a type that Ray does not name"):
        ray_site(LaunchOptions("ray"), "auto")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_loses_a_node(cluster, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    found = find_site(LaunchOptions("ray", ray_address=cluster.address), "auto")
    assert signal.getsignal(signal.SIGTERM) is before  # Ray's own would end the driver on the spot
    assert [(group.worker, group.gpus, group.threads) for group in found.groups] == [("0", 0, 2), ("1", 0, 2)]
    assert (found.devices.spec.name, found.devices.count, found.devices.spec.cores) == ("cpu", 2, 2)

    with open_run(tmp_path / "run", resume=False) as run:
        pool = ray_pool(STANDIN, restarts=partial(Restarts, first_s=0.1))
        pool.start(run.path, found.groups)
        first = [status(run.path, worker) for worker in "01"]
        assert [seen["env"]["NPROC"] for seen in first] == ["2", "2"] and pool.poll() == []

        cluster.remove_node(cluster.two[0], allow_graceful=False)
        [end] = wait_for(pool.poll, 60)
        assert end.cause.startswith("lost with its node: ") and not end.left
        lost, kept = first if end.worker == "0" else first[::-1]
        wait_for(lambda: gone(lost["pid"]), 10)
        assert not gone(kept["pid"])

        # GPUs that are not there: Ray hands them out by number all the same
        cluster.add_node(num_cpus=3, num_gpus=2, resources={"accelerator_type:H200": 1})
        wait_for(lambda: pool.poll() == [] and len(pids(run.path, end.worker)) == 2, 60)

        on_gpus = ray_site(LaunchOptions("ray", workers=3), "auto")
        assert [(group.gpus, group.threads) for group in on_gpus.groups] == [(1, 1)] * 3
        assert (on_gpus.devices.spec.name, on_gpus.devices.count) == ("H200", 3)
        assert on_gpus.note.endswith("has 2 GPUs now: 1 workers wait for more")
        gpus = ray_pool(STANDIN)
        gpus.start(run.path, [group._replace(worker="gpu0", kind="H200") for group in on_gpus.groups[:1]])
        env = status(run.path, "gpu0")["env"]
        assert env["CUDA_VISIBLE_DEVICES"] in "01" and env["JAX_PLATFORMS"] == "cuda,cpu"

        begun = time.monotonic()
        waiting = [
            group._replace(worker="w", gpus=9) for group in on_gpus.groups[:1]
        ]  # there is no such node
        gpus.start(run.path, waiting)
        pool.stop()
        gpus.stop()
        assert time.monotonic() - begun < 20
        assert all((run.path / f"saved-{worker}").exists() for worker in ("0", "1", "gpu0"))
        for worker in ("0", "1", "gpu0"):
            assert all(gone(pid) for pid in pids(run.path, worker))

        (run.path / "finish").touch()
        pool.start(run.path, found.groups[:1])
        [end] = wait_for(pool.poll, 60)
        assert (end.worker, end.cause, end.tail) == ("0", "", "worker 0 is working") and pool.alive() == []


def test_a_cluster_that_is_not_there(monkeypatch):
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(UserError, match=r"--ray-address 127\.0\.0\.1:1: .*Connection refused"):
        find_site(LaunchOptions("ray", ray_address="127.0.0.1:1"), "auto")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    with pytest.raises(UserError, match=r"--ray-address 127\.0\.0\.1:2: .*Connection refused"):
        find_site(LaunchOptions("ray"), "auto")


def test_the_run_directory_must_be_the_drivers(tmp_path: Path):
    assert "does not see" in not_shared(tmp_path / "absent", wait_s=0)
    with open_run(tmp_path / "run", resume=False) as run:
        assert not_shared(run.path, wait_s=0) == ""
        lock = run.path / ".lock"
        lock.rename(tmp_path / "moved")
        assert "node" in not_shared(run.path, wait_s=0)
        lock.touch()  # a file of the same name that the driver does not hold
        assert "does not see the driver's lock" in not_shared(run.path, wait_s=0)
    with open(tmp_path / "run" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not_shared(tmp_path / "run", wait_s=0) == ""
