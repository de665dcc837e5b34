"""Fit the shipped tables to what was measured on an H200: memory for every GPU, time for the H200.

usage: python -m scripts.planner.fit_tables MEMORY_POINTS.json... [STEPS.jsonl...]
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

START = {"flops": 7e14, "adapter_flops": 3e14, "attention_flops": 4e14, "token_passes": 2.0, "layer_s": 1e-4}
START |= {"layer": 1.25}
# to these, in logarithms: far weaker than a step's error
PULL = np.array([0.02, 0.02, 0.05, 0.02, 0.01, 0.02])
SINCE = {
    "step-h200-2026-11-30.jsonl": 488 / 527
}  # what scanned steps gained after it: 7B, 8 x 1 x 1024, dots


def write_table(model: CostModel, name: str) -> None:
    """Write a table, without the fields that are empty."""
    raw = json.loads(model.to_json())
    del raw["fitted"]
    (TABLES / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def with_values(base: CostModel, values: np.ndarray) -> CostModel:
    """Return a model with fitted speeds; `values` are the logarithms of START's.

    "none" and "dots" are written out and take the same time (7B, 8 x 1 x 1024: 428.7 and 428.8 ms).
    """
    found = dict(zip(START, map(float, np.exp(values)), strict=True))
    return replace(base, recompute={"none": 1.0, "dots": 1.0, "layer": found.pop("layer")}, **found)  # type: ignore[arg-type]


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
    """Fit the speeds to measured steps by least squares on relative errors, drawn weakly to START."""
    start = np.log(list(START.values()))

    def residuals(values: np.ndarray) -> np.ndarray:
        own = errors(with_values(base, values), steps, shapes)
        return np.concatenate([own, PULL * (values - start)])

    return with_values(base, least_squares(residuals, start).x)


def read_steps(path: str, precision: str, shapes: dict[str, ModelShape]) -> list[dict]:
    """Read the steps of a precision that run as training does: written out, or scanned where layers are recomputed."""
    steps = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("model") not in shapes or row.get("precision", "bf16") != precision or "superseded" in row:
            continue
        if row.get("micro_steps", 1) > 1 or row.get("recomputed") or "ms" not in row:
            continue
        if (row.get("unroll", 1) == 1) == (row["recompute"] == "layer"):
            steps.append(row | {"ms": [ms * SINCE.get(Path(path).name, 1.0) for ms in row["ms"]]})
    return steps


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
        # a margin that other points asked for stays
        memory = replace(memory, margin=max(memory.margin, table.memory.margin))
        assumed = "" if name == "H200" else "; assumed here"
        write_table(replace(table, memory=replace(memory, source=memory.source + assumed)), name.lower())
    if steps := [path for path in paths if path.endswith(".jsonl")]:
        fit_times(steps, {p.shape.name: p.shape for p in points})


def fit_times(paths: list[str], shapes: dict[str, ModelShape]) -> None:
    """Fit the H200's speeds, print how well, and write its table."""
    steps = [row for path in paths for row in read_steps(path, "bf16", shapes)]
    base = CostModel.load(TABLES / "h200.json")
    left_out = []
    for row in steps:
        others = [other for other in steps if kind(other) != kind(row)]
        left_out += list(errors(fit_steps(base, others, shapes), [row], shapes))
    fitted = fit_steps(base, steps, shapes)
    own, out = judge(errors(fitted, steps, shapes)), judge(left_out)
    print(f"time, {len(steps)} steps: mean {own.mean:.1%}, worst {own.worst:.1%}; ", end="")
    print(f"each shape left out in turn: mean {out.mean:.1%}, worst {out.worst:.1%}")
    for row, error, unseen in zip(steps, errors(fitted, steps, shapes), left_out, strict=True):
        print(f"  {kind(row)}: {row['ms'][0]:.0f} ms, {error:+.1%}, left out {unseen:+.1%}")
    eight = [row for path in paths for row in read_steps(path, "fp8", shapes)]
    at_rate_1 = replace(fitted, precision={**fitted.precision, "fp8": 1.0})
    rates = []
    for row in eight:  # what products would have to be faster by
        shape = shapes[row["model"]]
        products = 4.0 * (shape.linear_params + shape.vocab_size * shape.d_model) / fitted.flops
        whole = (1 + errors(at_rate_1, [row], shapes)[0]) * row["ms"][0] / 1e3
        products *= row["jobs"] * row["m"] * row["length"]
        rates.append(products / (row["ms"][0] / 1e3 - (whole - products)))
    if rates:
        fitted = replace(fitted, precision={**fitted.precision, "fp8": round(float(np.mean(rates)), 3)})
        print(f"fp8: products {', '.join(f'{rate:.2f}' for rate in rates)} times as fast")
    seen = f"measured: fitted to {len(steps)} steps, mean error {own.mean:.1%}, worst {own.worst:.1%}; "
    seen += f"each shape left out in turn, mean {out.mean:.1%}"
    latest = max(row.get("date", "") for row in steps)
    compiled = [
        row["compile_s"] for row in steps if row["recompute"] != "layer" and row.get("date", "") == latest
    ]
    compile_s = round(float(np.median(compiled)))
    sources = {**base.sources, **dict.fromkeys((*START, "recompute"), seen)}
    sources.pop("layer")
    sources["compile_s"] = f"measured: the median of the steps written out on {latest}"
    sources["precision"] = f"measured: fp8, {len(rates)} steps written out; the others estimated"
    write_table(replace(fitted, compile_s=float(compile_s), sources=sources), "h200")


def kind(row: dict) -> str:
    """Name a step's shape."""
    return f"{row['model']} {row['jobs']}x{row['m']}x{row['length']} {row['recompute']}"


if __name__ == "__main__":
    main(*sys.argv[1:])
