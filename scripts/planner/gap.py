"""The gap of our plans to the lower bound on random instances, by jobs per device group.

usage: python -m scripts.planner.gap OUT.json [--count 200] [--every N] [--processes N] [--reference SECONDS]
With --reference, instances of fewer than five jobs a group that are neither exact nor within 1 % of the bound are
searched on for so many seconds of CPU time each, from the plan, with new random numbers again and again.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from planner import Effort, Options, Plan, PlanError, cost_model, make_plan
from planner.groups import makespan
from planner.incumbent import repair
from planner.instance import Instance
from planner.ours import bounds, ours
from scripts.planner.instances import random_instance

CLASSES = ((0, 5), (5, 20), (20, 10**9))


def one(case: tuple[int, float]) -> dict[str, Any]:
    """Plan one instance; groups are counted in the plan's smallest degree."""
    seed, reference = case
    jobs, shape, on = random_instance(seed)
    row: dict[str, Any] = {
        "seed": seed,
        "jobs": len(jobs),
        "devices": f"{on.count}x{on.spec.name}",
        "model": shape.name,
    }
    started = time.process_time()
    try:
        plan = make_plan(jobs, shape, on, options=Options(baselines=False))
    except PlanError as error:
        return {**row, "error": str(error)}
    groups = on.count // min(pack.degree for pack in plan.packs)
    row |= {
        "cpu_s": time.process_time() - started,
        "per_group": len(jobs) / max(groups, 1),
        "makespan_s": plan.makespan_s,
        "bound_s": plan.lower_bound_s,
        "bound": plan.bound,
        "ratio": 1 + plan.gap,
        "method": plan.method,
    }
    if reference and row["per_group"] < 5 and plan.method != "exact" and plan.gap > 0.01:
        started = time.process_time()
        row["reference_s"] = longer(Instance(jobs, shape, on, "bf16", cost_model(on.spec)), plan, reference)
        row["reference_cpu_s"] = time.process_time() - started
    return row


def longer(instance: Instance, plan: Plan, seconds: float) -> float:
    """Return the makespan that a search of so many seconds of CPU time finds, from a plan."""
    effort = Effort(recuts=360, proposals=9_000, dives=24, restarts=10_000)
    start, until = repair(instance, plan.packs), time.process_time() + seconds
    found, _, _ = ours(instance, bounds(instance), effort, start, until, time.process_time)
    return makespan(found)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return mean and worst ratio by class as a Markdown table."""
    lines = [
        "| jobs a group | instances | mean | worst | exact | within 1 % of the bound | over reference, worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for low, high in CLASSES:
        here = [r for r in rows if "ratio" in r and low <= r["per_group"] < high]
        if not here:
            continue
        ratios = [r["ratio"] for r in here]
        over = [r["makespan_s"] / r["reference_s"] for r in here if "reference_s" in r]
        name = f"{low} to {high}" if high < 10**9 else f"{low} and more"
        exact = sum(r["method"] == "exact" for r in here)
        near = sum(r["method"] != "exact" and r["ratio"] <= 1.01 for r in here)
        worst = f"{max(over):.4f} (of {len(over)})" if over else "–"
        mean = sum(ratios) / len(ratios)
        lines.append(
            f"| {name} | {len(here)} | {mean:.4f} | {max(ratios):.4f} | {exact} | {near} | {worst} |"
        )
    failed = [r for r in rows if "error" in r]
    return "\n".join(lines) + f"\n\n{len(failed)} instances fit no device."


def main() -> None:
    """Plan every instance and write the raw rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="every so many instances of the range")
    parser.add_argument("--seeds", default="", help="instances by number, instead of a range")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--reference", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    seeds = [int(s) for s in options.seeds.split(",") if s] or range(
        options.first, options.first + options.count, options.every
    )
    cases = [(seed, options.reference) for seed in seeds]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(one, cases):
            rows.append(row)
            Path(options.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
