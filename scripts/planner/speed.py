"""How long planning takes, from 120 jobs on 8 devices to 10,000 on 1,024.

usage: python -m scripts.planner.speed OUT.json
"""

import json
import random
import sys
import time
from pathlib import Path

from planner import JobSpec, Options, devices, make_plan
from scripts.planner.instances import MODELS, RANKS, paper_jobs


def mixed_jobs(count: int, seed: int = 0) -> list[JobSpec]:
    """Draw jobs over three data sets, one or two epochs."""
    rng = random.Random(seed)
    sets = (("mrpc", 90.0, 128, 3668), ("gsm8k", 152.0, 256, 7473), ("long", 400.0, 512, 2500))
    jobs = []
    for i in range(count):
        name, mean, longest, rows = rng.choice(sets)
        batch = rng.choice((1, 2, 4, 8, 16, 32))
        jobs.append(
            JobSpec(f"job-{i:05d}", rng.choice(RANKS), batch, rows * rng.choice((1, 2)), mean, longest, name)
        )
    return jobs


CASES = {
    "120 jobs, 8 A100-40GB": (paper_jobs(120, 152), "8xA100-40GB"),
    "120 jobs, 8 H200": (paper_jobs(120, 152), "8xH200"),
    "5,000 jobs, 64 H200, equal rows": (paper_jobs(5000, 152), "64xH200"),
    "5,000 jobs, 64 A100-80GB, three data sets": (mixed_jobs(5000), "64xA100-80GB"),
    "10,000 jobs, 1,024 H200, equal rows": (paper_jobs(10_000, 152), "1024xH200"),
}


def main(out: str) -> None:
    """Plan every case and print a Markdown table."""
    import highspy  # imports are not planning
    import scipy.optimize

    assert highspy and scipy.optimize
    rows = []
    print("| case | planning_s | CPU s | baselines_s | gap | bound |\n|---|---|---|---|---|---|")
    for name, (jobs, on) in CASES.items():
        started = time.process_time()
        plan = make_plan(jobs, MODELS["Qwen2.5-7B"], devices(on), options=Options(baselines=len(jobs) < 1000))
        cpu = time.process_time() - started
        rows.append(
            {"case": name, "planning_s": plan.planning_s, "cpu_s": cpu, "gap": plan.gap, "bound": plan.bound}
        )
        print(
            f"| {name} | {plan.planning_s:.2f} | {cpu:.2f} | {plan.baselines_s:.2f} | {plan.gap:.4f} | {plan.bound} |"
        )
    Path(out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
