"""Compile the packed step over a grid of models, packs and policies, and write what the compiler says of its memory.

usage: python -m scripts.planner.memory_points OUT.jsonl      (on the device type the planner is to know; nothing runs)
"""

import json
import sys
import time

from plora_jax.bench import abstract_base, measure_step

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


def main(path: str) -> None:
    """Write one JSON line a point, as it comes."""
    with open(path, "a", encoding="utf-8") as out:
        order = [(model, cases[i]) for i in range(6) for model, cases in CASES.items()]
        for model, (jobs, m, length, rank, recompute) in order:
            start = time.time()
            try:
                case = measure_step(
                    abstract_base(model), jobs=jobs, m=m, length=length, rank=rank, recompute=recompute, repeats=0
                )
            except Exception as error:  # a point that does not compile is told, and the others go on
                case = {"model": model, "case": [jobs, m, length, rank, recompute], "error": str(error)[:500]}
            out.write(json.dumps(case) + "\n")
            out.flush()
            print(model, jobs, m, length, rank, recompute, f"{time.time() - start:.0f} s", case.get("error", ""), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
