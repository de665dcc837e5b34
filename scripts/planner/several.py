"""Plans for several sweeps at once beside equal shares of the devices and one sweep after another (docs/planner.md).

python -m scripts.planner.several
"""

import time

from planner import Options, Problem, devices, make_plan, plan_several
from scripts.planner.instances import MODELS, paper_jobs

CASES = (
    ("8xH200", (("Qwen2.5-7B", 60), ("Qwen2.5-14B", 60))),
    ("8xH200", (("Qwen2.5-3B", 30), ("Qwen2.5-7B", 30), ("Qwen2.5-32B", 10))),
    ("64xH200", (("Qwen2.5-7B", 300), ("Qwen2.5-14B", 200))),
    ("1024xH200", (("Qwen2.5-7B", 5_000), ("Qwen2.5-14B", 5_000))),
)


def main() -> None:
    """Print one line a case: devices of each sweep, makespan, bound and gap, and what two simpler ways would take."""
    print(
        "| devices | sweeps | devices of each | makespan, s | bound, s | gap | equal shares, s | in turn, s | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for text, sweeps in CASES:
        options, started = Options(baselines=False), time.process_time()
        asked = [Problem(model, paper_jobs(n, 152), MODELS[model], options=options) for model, n in sweeps]
        plan = plan_several(asked, devices(text))
        spent, share = time.process_time() - started, plan.device_count // len(asked)

        def alone(one: Problem, count: int, kind: str = plan.device) -> float:
            on = devices(f"{count}x{kind}")
            return make_plan(one.jobs, one.shape, on, options=one.options).makespan_s

        equal = max(alone(one, share) for one in asked)
        in_turn = sum(alone(one, plan.device_count) for one in asked)
        names = ", ".join(f"{n} {model}" for model, n in sweeps)
        shares = " + ".join(str(len(one.devices)) for one in plan.sweeps)
        print(
            f"| {text} | {names} | {shares} | {plan.makespan_s:.0f} | "
            f"{plan.lower_bound_s:.0f} | {plan.gap:.3f} | {equal:.0f} | {in_turn:.0f} | {spent:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
