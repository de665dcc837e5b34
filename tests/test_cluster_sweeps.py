"""Whole sweeps on clusters that lose a node: complete, and equal to the last bit to those of an undisturbed cluster."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.ray_cluster import ray_cluster
from tests.slurm_cluster import lose_node, missing, slurm_cluster
from tests.test_process import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parent.parent
JOBS = 24


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Write a sweep of 24 jobs, long enough for a checkpoint before a node is lost on a fast machine too."""
    folder = tmp_path_factory.mktemp("sweep")
    words = [
        f"{a} {b}" for a in ("red", "green", "blue", "one", "two") for b in ("one", "two", "three", "is")
    ]
    rows = [{"prompt": f"what is {text} ?", "completion": f" {text[:3].strip()}"} for text in words]
    tiny.write_rows(folder / "train.jsonl", rows)
    tiny.write_rows(
        folder / "eval.jsonl", [{"prompt": f"the {text}", "completion": " yes"} for text in words[:6]]
    )
    tiny.write_model(folder / "model", hidden_size=64, intermediate_size=128)
    tiny.write_weights(folder / "model")
    rates = [1e-4 * (i + 1) for i in range(JOBS // 4)]
    path = tiny.write_sweep(
        folder,
        search={"learning_rate": rates, "rank": [4, 8], "batch_size": [2, 4]},
        train={"epochs": 300, "dropout": 0.1},
        eval={"every_epochs": 100},
        devices="3xcpu-1GB",
    )
    return path


def start(sweep: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a driver as a process of its own; what it prints goes beside the run directory."""
    command = [sys.executable, "-m", "plora_jax", "sweep", sweep, "--out", out, "--checkpoint-every", "5"]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [*command, *options], stdout=log, stderr=log, cwd=ROOT
        )  # where the package is


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def training(out: Path, worker: str, after: int) -> dict[str, Any] | None:
    """Return a worker's status once it is past a micro-step of a pack and has a checkpoint of it."""
    path = out / "workers" / f"{worker}.json"
    status = json.loads(path.read_text()) if path.exists() else {}
    inside = status.get("micro_step", 0) > after and "training" in status.get("phase", "")
    saved = out / "journal.jsonl"
    return status if inside and any(line["kind"] == "saved" for line in lines(saved)) else None


def same(one: Path, other: Path) -> None:
    """Assert that two runs are complete and ended with the same bits."""
    boards = [json.loads((out / "leaderboard.json").read_text())["jobs"] for out in (one, other)]
    assert boards[0] == boards[1] and len(boards[0]) == JOBS
    assert {row["status"] for row in boards[0]} == {"completed"}
    for row in boards[0]:
        files = [
            out / "jobs" / row["job_id"] / "adapter" / "adapter_model.safetensors" for out in (one, other)
        ]
        assert files[0].read_bytes() == files[1].read_bytes()
        logs = [out / "jobs" / row["job_id"] / "metrics.jsonl" for out in (one, other)]
        assert lines(logs[0]) == lines(logs[1])


def test_a_ray_cluster_loses_one_of_three_nodes(sweep, tmp_path):
    pytest.importorskip("ray")
    with ray_cluster(1, 1, 1) as (cluster, nodes):
        options = ("--launcher", "ray", "--workers", "3", "--ray-address", cluster.address)
        quiet, shaken = tmp_path / "quiet", tmp_path / "shaken"
        assert start(sweep, quiet, *options).wait() == 0
        driver = start(sweep, shaken, *options)
        before = {worker: wait_for(lambda w=worker: training(shaken, w, 100), 600) for worker in "012"}
        cluster.remove_node(nodes[1], allow_graceful=False)
        assert driver.wait() == 0
    [lost] = [line for line in lines(shaken / "events.jsonl") if line["event"] == "worker_lost"]
    assert lost["cause"].startswith("lost with its node")
    claims = [line["pack"] for line in lines(shaken / "journal.jsonl") if line["kind"] == "claim"]
    assert claims.count(before[lost["worker"]]["pack"]) == 2  # its pack was taken up by another worker
    assert any(line["event"] == "restored" for line in lines(shaken / "events.jsonl"))
    same(quiet, shaken)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_slurm_cluster_loses_a_node_and_then_its_driver(sweep, tmp_path, tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as daemons:
        options = ("--launcher", "slurm", "--workers", "3", "--slurm=--time=30 --cpus-per-task=1")
        quiet, shaken = tmp_path / "quiet", tmp_path / "shaken"
        assert start(sweep, quiet, *options).wait() == 0
        driver = start(sweep, shaken, *options)
        for worker in "012":
            wait_for(lambda w=worker: training(shaken, w, 100), 600)
        lose_node(daemons, "n2")
        driver.kill()
        driver.wait()
        wait_for(
            lambda: (shaken / "leaderboard.json").exists(), 1800
        )  # written by the job that waits for the others
    same(quiet, shaken)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_driver_in_a_job_of_its_own_whose_time_is_up(sweep, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PLORA", f"{sys.executable} -m plora_jax")
    out = tmp_path / "run"
    with slurm_cluster(tmp_path_factory.mktemp("slurm")):
        script = ROOT / "scripts" / "slurm" / "sweep.sbatch"
        options = [sweep, "--out", out, "--workers", "2", "--checkpoint-every", "5", "--slurm=--time=30"]
        mine = ["sbatch", "--parsable", f"--output={tmp_path}/driver.log", script, *options]
        job = subprocess.run(mine, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        for worker in "01":
            wait_for(lambda w=worker: training(out, w, 50), 600)
        # as SLURM does two minutes before the end
        subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
        wait_for(lambda: (out / "leaderboard.json").exists(), 1800)
        wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout, 120)
    board = json.loads((out / "leaderboard.json").read_text())["jobs"]
    assert len(board) == JOBS and {row["status"] for row in board} == {"completed"}
    events = lines(out / "events.jsonl")
    assert [line["event"] for line in events].count("started") == 2
    assert any(line["event"] == "restored" for line in events)
    assert "terminated; add --resume to go on" in (tmp_path / "driver.log").read_text()
