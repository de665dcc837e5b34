"""Compile the packed step over a grid of models, packs and policies, and write what the compiler says of its memory.

usage: python -m scripts.planner.memory_points OUT.json      (on the device type the planner is to know; nothing runs)
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from plora_jax.bench.step import abstract_base, measure_step
from plora_jax.models.find import load_config
from plora_jax.planning import model_shape

# (jobs, m, length, rank, recompute) by model; every third point is held out from the fit by its place in the list
CASES = {
    "Qwen/Qwen2.5-0.5B-Instruct": [
        (1, 1, 1024, 8, "none"),
        (8, 1, 1024, 32, "none"),
        (32, 1, 128, 32, "none"),
        (32, 1, 1024, 32, "layer"),
        (16, 2, 256, 64, "dots"),
        (4, 4, 512, 16, "layer"),
    ],
    "Qwen/Qwen2.5-1.5B-Instruct": [
        (4, 1, 1024, 64, "dots"),
        (8, 4, 256, 8, "none"),
        (16, 1, 512, 128, "layer"),
        (2, 1, 2048, 16, "none"),
        (24, 1, 192, 32, "dots"),
        (8, 2, 1024, 32, "layer"),
    ],
    "Qwen/Qwen2.5-3B-Instruct": [
        (1, 1, 1024, 32, "none"),
        (8, 1, 1024, 16, "dots"),
        (32, 1, 256, 32, "layer"),
        (12, 1, 512, 64, "none"),
        (4, 8, 128, 128, "dots"),
        (16, 1, 1024, 8, "layer"),
    ],
    "Qwen/Qwen2.5-7B-Instruct": [
        (8, 1, 1024, 32, "none"),
        (8, 1, 1024, 32, "dots"),
        (8, 1, 1024, 32, "layer"),
        (32, 1, 128, 32, "none"),
        (32, 1, 256, 32, "layer"),
        (4, 2, 512, 128, "dots"),
    ],
    "meta-llama/Llama-3.1-8B-Instruct": [
        (4, 1, 1536, 16, "none"),
        (8, 1, 512, 64, "dots"),
        (16, 1, 256, 32, "none"),
        (2, 4, 512, 8, "layer"),
        (6, 1, 1024, 16, "dots"),
        (12, 2, 128, 128, "layer"),
    ],
}


def point(result: dict[str, Any]) -> dict[str, Any]:
    """Turn a measurement of the step into a memory point as planner.fit reads it."""
    shape = model_shape(load_config(result["model"]), result["model"])
    names = {"J": "jobs", "m": "m", "S": "length", "rank_bucket": "rank_bucket", "policy": "recompute"}
    return {
        "model": dataclasses.asdict(shape),
        "degree": 1,
        "optimizer": "adamw",
        "bytes": result["total_bytes"],
        **{name: result[name] for name in ("precision", "attention", "accumulate")},
        **{ours: result[theirs] for ours, theirs in names.items()},
    }


def main(path: str) -> None:
    """Measure every case and write the points as one JSON list."""
    points = []
    for model, (jobs, m, length, rank, recompute) in [
        (n, cases[i]) for i in range(6) for n, cases in CASES.items()
    ]:
        base = abstract_base(model)
        case = measure_step(base, jobs=jobs, m=m, length=length, rank=rank, recompute=recompute, repeats=0)
        points.append(point(case))
        print(model, jobs, m, length, rank, recompute, f"{case['total_bytes'] / 2**30:.2f} GiB", flush=True)
        Path(path).write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
