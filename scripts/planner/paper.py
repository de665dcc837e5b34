"""The paper's experiment: 120 configurations on eight GPUs, six models, three lengths, two sets of batch sizes.

usage: python -m scripts.planner.paper OUT.json [--every N] [--processes N]
Columns: Min GPU, the published method (as published, and on our step), ours, and the largest speed-up the model
allows (Min GPU / lower bound). Prints Markdown.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from planner import PlanError, cost_model, devices, make_plan
from planner.baselines import min_gpu_s
from planner.instance import Instance
from planner.ours import bounds
from planner.published import Published
from scripts.planner.instances import MODELS, paper_jobs

DEVICES = ("8xA100-40GB", "8xH200")
LENGTHS = (1024, 152, 90)
ALL_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
BATCHES = ((1, 2, 4, 8, 16, 32), (1, 2, 4))


def one(case: tuple[str, str, int, tuple[int, ...]]) -> dict[str, Any]:
    """Plan one cell of the experiment."""
    on, model, length, batches = case
    jobs, where = paper_jobs(120, length, batches), devices(on)
    row: dict[str, Any] = {"devices": on, "model": model, "length": length, "batches": list(batches)}
    try:
        started = time.process_time()
        plan = make_plan(jobs, MODELS[model], where)
        row["cpu_s"] = time.process_time() - started
    except PlanError as error:
        return {**row, "error": str(error)}
    instance = Instance(jobs, MODELS[model], where, "bf16", cost_model(where.spec))
    row |= {
        "min_gpu_s": plan.baselines["min_gpu_s"],
        "published_speedup": equal_steps_speedup(instance),
        "published_on_our_step_s": plan.baselines["dtm_s"],
        "ours_s": plan.makespan_s,
        "bound_s": plan.lower_bound_s,
        "bound": plan.bound,
        "method": plan.method,
        "planning_s": plan.planning_s,
        "programs": len(plan.packs),
    }
    return row


def equal_steps_speedup(instance: Instance) -> float:
    """Return the published method's speed-up over Min GPU on its own terms: native batches, 500 steps each."""
    jobs = [replace(job, rows=500 * job.batch_size) for job in instance.jobs]
    own = Instance(jobs, instance.shape, instance.devices, instance.precision, instance.cost)
    return min_gpu_s([own]) / Published(own, native=True).schedule()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; speed-ups are over Min GPU."""
    lines = [
        "| devices | model | length | batches | Min GPU, h | published | on our step | ours | allowed "
        "| ours / allowed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        sizes = f"1…{max(r['batches'])}"
        head = f"| {r['devices']} | {r['model']} | {r['length']} | {sizes} "
        if "error" in r:
            lines.append(f"{head}| {r['error']} |||||||")
            continue
        base, bound = r["min_gpu_s"], r["bound_s"]
        cells = [f"{r['published_speedup']:.2f}×"]
        cells += [f"{base / r[name]:.2f}×" for name in ("published_on_our_step_s", "ours_s")]
        share = bound / r["ours_s"]
        lines.append(f"{head}| {base / 3600:.2f} | {' | '.join(cells)} | {base / bound:.2f}× | {share:.3f} |")
    return "\n".join(lines)


def allowed_by_length(on: str, model: str, batches: tuple[int, ...]) -> str:
    """Return the largest speed-up the model allows at each row length: where the published figures would lie."""
    cells = []
    for length in ALL_LENGTHS:
        where = devices(on)
        instance = Instance(
            paper_jobs(120, length, batches), MODELS[model], where, "bf16", cost_model(where.spec)
        )
        cells.append(f"{min_gpu_s([instance]) / bounds(instance).seconds:.2f}")
    return f"| {on} | {model} | 1…{max(batches)} | " + " | ".join(cells) + " |"


def main() -> None:
    """Run every cell and write the raw rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="every so many cells of the 72")
    options = parser.parse_args()
    cases = list(product(DEVICES, MODELS, LENGTHS, BATCHES))[:: options.every]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for row in pool.map(one, cases):
            rows.append(row)
            Path(options.out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    if options.every > 1:
        return
    lengths = " | ".join(map(str, ALL_LENGTHS))
    print(f"\n| devices | model | batches | {lengths} |\n" + "|---" * (3 + len(ALL_LENGTHS)) + "|")
    for model in MODELS:
        print(allowed_by_length(DEVICES[0], model, BATCHES[0]))


if __name__ == "__main__":
    main()
