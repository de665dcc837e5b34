"""Fit the shipped tables to what was measured on an H200: memory for every GPU, time for the H200.

usage: python -m scripts.planner.fit_tables MEMORY_POINTS.json... [STEPS.jsonl]
Every third memory point of a list is held out. Prints the errors and rewrites planner/tables/*.json. Memory depends on
the compiler more than on the GPU, so the factors of one GPU serve all; times do not: other GPUs keep estimates.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from planner.devices import DEVICES
from planner.fit import fit_memory, judge, read_memory_points
from planner.memory import may_fuse, step_memory
from planner.specs import ModelShape
from planner.time import TABLES, CostModel

FITTED = ("flops", "adapter_flops", "layer_s")


def write_table(model: CostModel, name: str) -> None:
    """Write a table, without the fields that are empty."""
    raw = json.loads(model.to_json())
    del raw["fitted"]
    (TABLES / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def with_values(base: CostModel, values: np.ndarray) -> CostModel:
    """Return a model with fitted speeds; `values` are logarithms: three speeds, then the policies' factors."""
    speeds = dict(zip(FITTED, map(float, np.exp(values[:3])), strict=True))
    recompute = {"none": 1.0, "dots": float(np.exp(values[3])), "layer": float(np.exp(values[4]))}
    return replace(base, **speeds, recompute=recompute)


def errors(model: CostModel, steps: list[dict], shapes: dict[str, ModelShape]) -> np.ndarray:
    """Return prediction / measured − 1 of each step."""
    out = []
    for row in steps:
        shape = shapes[row["model"]]
        cost = model.step_cost(shape, 1, row["recompute"], row["precision"], row["length"])
        seconds = cost.seconds(row["jobs"], row["m"], row["length"], row["rank_bucket"])
        out.append(seconds / (np.median(row["ms"]) / 1000) - 1)
    return np.array(out)


def fit_steps(base: CostModel, steps: list[dict], shapes: dict[str, ModelShape]) -> CostModel:
    """Fit the speeds to measured steps by least squares on relative errors, drawn weakly to the table's."""
    start = np.log([*(getattr(base, name) for name in FITTED), 1.0, 1.18])

    def residuals(values: np.ndarray) -> np.ndarray:
        own = errors(with_values(base, values), steps, shapes)
        return np.concatenate([own, 0.01 * (values - start)])

    return with_values(base, least_squares(residuals, start).x)


def main(*paths: str) -> None:
    """Fit, print how well, and write the tables; times stay where no steps are given."""
    lists = [read_memory_points(path) for path in paths if path.endswith(".json")]
    points = [p for made in lists for p in made]
    held_out = [p for made in lists for p in made[2::3]]
    memory, held = fit_memory([p for p in points if p not in held_out], held_out)
    bare = replace(memory, margin=0.0)
    for p in points:
        s, error = p.step, step_memory(p.shape, p.step, p.precision, p.device, bare) / p.bytes - 1
        fused = may_fuse(p.shape, s, p.precision, p.device) and s.policy == "none"
        words = ["fused"] * fused + ["summed"] * s.accumulate + ["held out"] * (p in held_out)
        print(f"  {p.shape.name} {s.J}x{s.m}x{s.S} r{s.rank_bucket} {s.policy}", *words, end=": ")
        print(f"{p.bytes / 2**30:.1f} GiB, {error:+.1%}")
    memory = replace(
        memory, source=f"measured: {len(points)} compiled steps on an H200, {len(held_out)} held out"
    )
    worst = f"mean {held.mean:.1%}, worst {held.worst:.1%}"
    print(f"memory, {held.points} held-out points: {worst}; margin {memory.margin:.1%}")
    for name in DEVICES:
        table = CostModel.load(TABLES / f"{name.lower()}.json")
        assumed = "" if name == "H200" else "; assumed here"
        write_table(replace(table, memory=replace(memory, source=memory.source + assumed)), name.lower())
    for path in paths:
        if path.endswith(".jsonl"):
            fit_times(path, {p.shape.name: p.shape for p in points})


def fit_times(steps_path: str, shapes: dict[str, ModelShape]) -> None:
    """Fit the H200's speeds, print how well, and write its table."""
    steps = [json.loads(line) for line in Path(steps_path).read_text(encoding="utf-8").splitlines()]
    steps = [row for row in steps if row["model"] in shapes]
    base = CostModel.load(TABLES / "h200.json")
    left_out = []
    for i, row in enumerate(steps):
        others = [s for n, s in enumerate(steps) if n != i]
        left_out += list(errors(fit_steps(base, others, shapes), [row], shapes))
    fitted = fit_steps(base, steps, shapes)
    own, out = judge(errors(fitted, steps, shapes)), judge(left_out)
    print(f"time, {len(steps)} steps: mean {own.mean:.1%}, worst {own.worst:.1%}; ", end="")
    print(f"each left out in turn: mean {out.mean:.1%}, worst {out.worst:.1%}")
    for row, error in zip(steps, errors(fitted, steps, shapes), strict=True):
        print(f"  {row['model']} {row['jobs']}x{row['m']}x{row['length']} {row['recompute']}: {error:+.1%}")
    seen = f"measured: fitted to {len(steps)} steps, each left out in turn {out.mean:.1%} mean error"
    compile_s = round(max(row["compile_s"] for row in steps))
    sources = {**base.sources, **dict.fromkeys((*FITTED, "recompute"), seen)}
    sources["compile_s"] = "measured: the longest of those steps"
    write_table(replace(fitted, compile_s=compile_s, sources=sources), "h200")


if __name__ == "__main__":
    main(*sys.argv[1:])
