"""The quickstart itself: a real model and a real task, on the CPU."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from plora_jax import quickstart
from plora_jax.data.examples import DataReport, Examples
from plora_jax.data.shapes import choose_shapes
from plora_jax.jobs import Job
from plora_jax.models.load import load_base
from plora_jax.training.step import pack_spec
from plora_jax.training.trainer import Work, train_pack


def tree_memory(pid):
    """Bytes of memory that a process and its descendants hold; pages that several share count in each."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
        children = Path(f"/proc/{pid}/task").glob("*/children")
        return own + sum(tree_memory(child) for path in children for child in path.read_text().split())
    except OSError:  # it has ended
        return 0


HALF = {  # of the quickstart's jobs: each field has both of its values, and no two fields go together
    "jobs": [
        {"learning_rate": rate, "rank": rank, "alpha": 2 * rank, "batch_size": batch}
        for rate, rank, batch in ((3e-4, 8, 4), (3e-4, 16, 8), (1e-3, 8, 8), (1e-3, 16, 4))
    ]
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "search", [HALF, pytest.param(quickstart.SEARCH, marks=pytest.mark.long)], ids=[4, 8]
)
def test_quickstart_beats_the_base_model_on_rows_that_chose_nothing(tmp_path, search):
    out, peak = tmp_path / "run", 0
    code = f"from plora_jax import cli, quickstart; quickstart.SEARCH = {search}; cli.command()"
    command = [sys.executable, "-c", code, "quickstart", "--out", str(out)]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}  # as users' processes
    with open(tmp_path / "stdout", "w") as told, open(tmp_path / "stderr", "w") as errors:
        process = subprocess.Popen(command, stdout=told, stderr=errors, env=env)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(0.5)
    stdout = (tmp_path / "stdout").read_text()
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    board = json.loads((out / "leaderboard.json").read_text())
    jobs = board["jobs"]
    assert len(jobs) == (4 if search is HALF else 8) and all(job["status"] == "completed" for job in jobs)
    assert all(len({job[field] for job in jobs}) == 2 for field in ("rank", "learning_rate", "batch_size"))
    assert board["base"]["rows"] == 64 and board["test"]["rows"] == 150
    base, best = board["test"]["base"]["score"], board["test"]["best"]["score"]
    assert best >= max(base, 0.5) + 0.05, f"base {base}, best {best}"  # both labels are equally frequent
    assert "makespan" in stdout and "tokens/s" in stdout and "left" in stdout
    assert stdout.rstrip().endswith(f"{out / jobs[0]['adapter']}")
    settings = json.loads((out / "best" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert 2**30 < peak < 6 * 2**30, f"{peak / 2**30:.2f} GiB"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_trains_in_a_pack_as_alone():
    """Twenty steps of SmolLM2-135M in float32: losses within 1e-5, adapters within 1e-3 in norm."""
    base = load_base(str(quickstart.fetch_model()), precision="fp32")
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 49152, 16).astype(np.int32) for _ in range(40)]
    rows = Examples(
        tokens, [np.arange(16) >= 14] * 40, DataReport("rows", {"text": 40}, 40, 0, 0, 0, 0, 16, 16, 0, 0)
    )
    jobs = [
        Job(rank=8, alpha=16, learning_rate=3e-4, batch_size=2),
        Job(rank=16, alpha=32, learning_rate=1e-3, batch_size=2, weight_decay=0.1, seed=1),
    ]

    def train(packed):
        spec, losses = pack_spec(base.config, packed), {job.job_id: [] for job in packed}
        queues = [[Work(job, rows)] for job in packed]
        shapes = choose_shapes([(rows, 0)], 2, limit=1)
        done = train_pack(
            base, spec, queues, 2, shapes, on_step=lambda job, line: losses[job.job_id].append(line["loss"])
        )
        return {t.job.job_id: (t.adapter, losses[t.job.job_id]) for t in done}

    pack, job = train(jobs), jobs[1]
    adapter, losses = pack[job.job_id]
    alone, alone_losses = train([job])[job.job_id]
    assert len(losses) == 20 and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-5)
    pairs = list(zip(jax.tree.leaves(adapter), jax.tree.leaves(alone), strict=True))
    apart = np.sqrt(sum(np.square(np.float64(a) - b).sum() for a, b in pairs))
    assert apart / np.sqrt(sum(np.square(np.float64(b)).sum() for _, b in pairs)) < 1e-3
