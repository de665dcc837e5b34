"""Plans for devices of several types beside those for each type alone (docs/planner.md).

python -m scripts.planner.mixtures
"""

import time

from planner import Options, devices, make_plan
from scripts.planner.instances import MODELS, paper_jobs

CASES = (
    ("Qwen2.5-7B", 120, "4xA100-40GB+4xH200"),
    ("Qwen2.5-7B", 120, "4xL40S+4xA100-80GB+2xH200"),
    ("Qwen2.5-7B", 32, "2xA100-40GB+1xH200"),
    ("Qwen2.5-7B", 8, "1xA100-40GB+1xH200"),
    ("Qwen2.5-3B", 500, "16xA100-40GB+8xH200"),
)


def main() -> None:
    """Print one line a case: makespan, bound and gap of the mixture, and the makespan of each type alone."""
    print("| model | jobs | devices | makespan, s | bound, s | gap | each type alone, s | method | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, n, text in CASES:
        jobs, options = paper_jobs(n, 152), Options(baselines=False)
        on, started = devices(text), time.process_time()
        plan = make_plan(jobs, MODELS[model], on, options=options)
        spent = time.process_time() - started
        alone = [make_plan(jobs, MODELS[model], part, options=options).makespan_s for part in on.parts]
        ends = " / ".join(f"{s:.0f}" for s in alone)
        print(
            f"| {model} | {n} | {text} | {plan.makespan_s:.0f} | {plan.lower_bound_s:.0f} ({plan.bound}) | "
            f"{plan.gap:.3f} | {ends} | {plan.method} | {spent:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
