"""Workers in a SLURM job array. The long tests need SLURM's own daemons, and start a cluster of two nodes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plora_jax.errors import UserError
from plora_jax.launch.pool import Ended
from plora_jax.launch.process import Group
from plora_jax.launch.site import LaunchOptions, find_site
from plora_jax.launch.slurm import SlurmArray, SlurmError, _code, _expand, slurm, task_group
from tests.slurm_cluster import lose_node, missing, slurm_cluster
from tests.test_launch import pids
from tests.test_process import STANDIN, gone, status, wait_for

TASK = [sys.executable, "-m", "plora_jax.launch.slurm"]


def task(run: Path, **env: str) -> subprocess.Popen[str]:
    """Run what a task of the array runs, as SLURM would."""
    env = os.environ | {"SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "2"} | env
    command = [*TASK, str(run), "--devices", "cpu", "--module", STANDIN]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_task_keeps_its_worker_running(tmp_path):
    process = task(tmp_path)
    seen = status(tmp_path, "3")
    assert seen["env"]["NPROC"] == "2"
    os.kill(seen["pid"], signal.SIGKILL)
    wait_for(lambda: len(pids(tmp_path, "3")) == 2)
    process.terminate()
    assert process.wait(20) == 143 and (tmp_path / "saved-3").exists()
    assert process.stdout and process.stdout.read().startswith("worker 3: killed by SIGKILL")


def test_a_task_ends_with_its_worker(tmp_path):
    (tmp_path / "finish").touch()
    process = task(tmp_path)
    assert process.communicate(timeout=30)[0] == "worker 3: done\n" and process.returncode == 0


def test_a_task_needs_the_gpu_it_was_given(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match="JAX_PLATFORMS=cpu is set: running on the CPU"):
        task_group("0", "auto")


def test_threads_are_those_slurm_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    assert task_group("5", "cpu")[:5] == ("5", 0, (), (), 2)  # counted, not bound to cores
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert task_group("5", "cpu")[:5] == ("5", 0, (), (0, 1, 2, 3), 4)


def test_slurms_numbers():
    # "ExitCode" in scontrol(1): the exit code, and the signal that ended the job, if any
    assert [_code(text) for text in ("0:0", "3:0", "0:9", "143:0")] == [0, 3, -9, -15]
    assert _expand("0-3,7%2") == ["0", "1", "2", "3", "7"] and _expand("") == []


def test_what_cannot_be_launched(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no sbatch on this machine"):
        find_site(LaunchOptions("slurm"), "2xcpu-1GB")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/sbatch")
    for devices in ("auto", "cpu"):
        with pytest.raises(UserError, match=f"devices: {devices}: SLURM does not tell"):
            find_site(LaunchOptions("slurm"), devices)
    with pytest.raises(UserError, match="tasks of a SLURM job array are all alike"):
        find_site(LaunchOptions("slurm"), "2xA100+2xH200")
    with pytest.raises(UserError, match="devices: device 'H2000' is not known"):
        find_site(LaunchOptions("slurm"), "8xH2000")
    with pytest.raises(UserError, match=r"--slurm .*one line"):
        find_site(LaunchOptions("slurm", slurm="--time=1\nrm -r x"), "8xH200")
    found = find_site(LaunchOptions("slurm", workers=3), "8xH200")
    assert [group.gpus for group in found.groups] == [1, 1, 1] and found.devices.count == 3
    assert found.devices.degrees == (1,)  # a task has one GPU
    with pytest.raises(SlurmError, match="false: exit code 1"):
        slurm("false")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, int]]:
    if why := missing():
        pytest.skip(why)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as daemons:
        yield daemons


def queue(job: str) -> str:
    command = ["squeue", "-h", "-t", "all", "-o", "%i %T", "-j", job]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.long
def test_an_array_of_workers(cluster, tmp_path):
    array = SlurmArray("--time=10", poll_s=0.5, module=STANDIN)
    array.start(tmp_path, [Group("0"), Group("1")])
    first = [status(tmp_path, worker) for worker in "01"]
    assert [seen["env"]["NPROC"] for seen in first] == ["1", "1"]
    assert array.poll() == [] and array.alive() == ["0", "1"] and "PENDING" in queue(array._finish)
    os.kill(first[0]["pid"], signal.SIGKILL)  # started again on the spot
    wait_for(lambda: len(pids(tmp_path, "0")) == 2)
    (tmp_path / "finish").touch()
    ended: list[Ended] = []
    wait_for(lambda: ended.extend(array.poll()) or not array.alive(), 60)
    assert sorted((end.worker, end.cause) for end in ended) == [("0", ""), ("1", "")]
    array.stop()
    assert "PENDING" not in queue(array._finish)


@pytest.mark.long
def test_stopping_lets_workers_save(cluster, tmp_path):
    array = SlurmArray(poll_s=0.5, module=STANDIN)
    array.start(tmp_path, [Group(str(i)) for i in range(5)])  # there is room for four
    for worker in "0123":
        status(tmp_path, worker)
    array.stop()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == [f"saved-{i}" for i in range(4)]
    assert not {"RUNNING", "PENDING"} & set(queue(array._job).split())
    # the next driver ends what one that died has left
    other = SlurmArray(poll_s=0.5, module=STANDIN)
    other.start(tmp_path, [Group("0")])
    wait_for(lambda: len(pids(tmp_path, "0")) == 2)
    third = SlurmArray(poll_s=0.5, module=STANDIN)
    third.start(tmp_path, [Group("0")])
    assert gone(pids(tmp_path, "0")[1])
    third.stop()


@pytest.mark.long
def test_a_worker_that_never_starts(cluster, tmp_path):
    (tmp_path / "mode").write_text("stillborn")
    array = SlurmArray(poll_s=0.5, module=STANDIN)
    array.start(tmp_path, [Group("0")])
    [end] = wait_for(array.poll, 60)
    assert end.left and "CUDA_ERROR_NO_DEVICE" in end.cause and array.alive() == []
    with pytest.raises(SlurmError, match="sbatch: "):
        SlurmArray("--partition=none", module=STANDIN).start(tmp_path, [Group("0")])


@pytest.mark.long
def test_a_task_whose_time_is_up_goes_back_into_the_queue(cluster, tmp_path):
    array = SlurmArray("--time=3", poll_s=1, module=STANDIN)  # told after one minute of the three
    begun = time.monotonic()
    array.start(tmp_path, [Group("0")])
    status(tmp_path, "0")
    [end] = wait_for(array.poll, 150)
    assert "put it back into the queue" in end.cause and not end.left
    assert (tmp_path / "saved-0").exists() and time.monotonic() - begun < 110  # SLURM: up to a minute early
    wait_for(lambda: len(pids(tmp_path, "0")) == 2, 240)  # SLURM lets a requeued job wait for two minutes
    (tmp_path / "finish").touch()
    [end] = wait_for(array.poll, 30)
    assert (end.cause, end.left) == ("", True)
    array.stop()


@pytest.mark.long
def test_a_lost_node(cluster, tmp_path):
    array = SlurmArray("--nodelist=n2", poll_s=1, module=STANDIN)
    array.start(tmp_path, [Group("0")])
    seen = status(tmp_path, "0")
    lose_node(cluster, "n2")
    wait_for(lambda: gone(seen["pid"]), 10)
    [end] = wait_for(array.poll, 120)
    assert "put it back into the queue" in end.cause and not end.left
    array.stop()
    assert json.loads((tmp_path / "workers" / "slurm.json").read_text())["workers"] == array._job
