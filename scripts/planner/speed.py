"""How long planning takes, from 120 jobs on 8 devices to 10,000 on 1,024.

usage: python -m scripts.planner.speed OUT.json [RUNS]
Medians of so many runs, one unless told. Cores differ, and the same core from hour to hour: beside each time stands how
long five million additions in Python took just before, and the one over the other.
"""

import json
import random
import statistics
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

TIMES = ("planning_s", "additions_s", "planning_s / additions_s", "cpu_s", "baselines_s")


def additions_s() -> float:
    """Time five million additions in plain Python."""
    started, total = time.perf_counter(), 0
    for i in range(5_000_000):
        total += i
    return time.perf_counter() - started


def main(out: str, runs: int = 1) -> None:
    """Plan every case and print a Markdown table."""
    import highspy  # imports are not planning
    import scipy.optimize

    assert highspy and scipy.optimize
    rows = []
    print("| case |", " | ".join(TIMES), "| gap | bound |")
    print("|---" * (len(TIMES) + 3) + "|")
    for name, (jobs, on) in CASES.items():
        options, found = Options(baselines=len(jobs) < 1000), []
        for _ in range(runs):
            loop, started = additions_s(), time.process_time()
            plan = make_plan(jobs, MODELS["Qwen2.5-7B"], devices(on), options=options)
            cpu = time.process_time() - started
            found.append((plan.planning_s, loop, plan.planning_s / loop, cpu, plan.baselines_s))
        medians = [statistics.median(column) for column in zip(*found, strict=True)]
        rows.append(
            {
                "case": name,
                **dict(zip(TIMES, medians, strict=True)),
                "gap": plan.gap,
                "bound": plan.bound,
                "runs": found,
            }
        )
        print(
            f"| {name} |",
            " | ".join(f"{median:.2f}" for median in medians),
            f"| {plan.gap:.4f} | {plan.bound} |",
        )
    Path(out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
