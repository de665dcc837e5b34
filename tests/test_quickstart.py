"""The quickstart itself: a real model and a real task, on the CPU."""

import json
import resource
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_quickstart_beats_the_base_model_on_rows_that_chose_nothing(tmp_path):
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "plora_jax.cli", "quickstart", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    board = json.loads((out / "leaderboard.json").read_text())
    jobs = board["jobs"]
    assert len(jobs) == 8 and all(job["status"] == "completed" for job in jobs)
    assert all(len({job[field] for job in jobs}) == 2 for field in ("rank", "learning_rate", "batch_size"))
    assert board["base"]["rows"] == 64 and board["test"]["rows"] == 150
    base, best = board["test"]["base"]["score"], board["test"]["best"]["score"]
    assert best >= max(base, 0.5) + 0.05, f"base {base}, best {best}"  # both labels are equally frequent
    assert "makespan" in done.stdout and "tokens/s" in done.stdout and "left" in done.stdout
    assert done.stdout.rstrip().endswith(f"{out / jobs[0]['adapter']}")
    settings = json.loads((out / "best" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < 6 * 2**30, f"{peak / 2**30:.2f} GiB"
