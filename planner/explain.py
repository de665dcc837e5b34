"""Why a plan looks as it does: for each pack what limits J and m, and what would shorten the sweep."""

from collections.abc import Mapping, Sequence

from planner.devices import Devices, Mixture
from planner.instance import Instance, step_shape
from planner.memory import offloaded_bytes
from planner.plan import Pack, Plan
from planner.render import device_range, duration
from planner.signature import LAST_RESORT, batch_divisor, divisors
from planner.simulate import Ladder, stretch
from planner.specs import JobSpec, ModelShape, check_jobs
from planner.time import CostModel, cost_models

SATURATED = 0.03  # J is called saturating when one slot more saves less of a row's time than this


def explain_plan(
    plan: Plan,
    jobs: Sequence[JobSpec],
    shape: ModelShape,
    devices: Devices | Mixture,
    *,
    cost_model: CostModel | Mapping[str, CostModel] | None = None,
) -> str:
    """Return sentences on every pack of a plan: why this J and this m, and what limits them (`--explain`)."""
    kept, _ = check_jobs(list(jobs), shape)
    costs = cost_models(devices, cost_model)

    def instances_of(some: Sequence[JobSpec]) -> dict[str, Instance]:
        return {
            part.spec.name: Instance(list(some), shape, part, plan.precision, costs[part.spec.name])
            for part in devices.parts
        }

    lines, rung, done = [_bound(plan), *_types(plan), *_rungs(plan)], None, dict.fromkeys(plan.jobs, 0.0)
    instances = instances_of(kept)
    spec = {job.job_id: job for job in kept}
    for n, pack in enumerate(plan.packs):
        if pack.rung != rung:
            rung = pack.rung
            parts = {
                job.job_id: stretch(job, Ladder(1, tuple(plan.jobs[job.job_id]["rungs"])), done[job.job_id])
                for job in kept
                if done[job.job_id] < 1
            }
            spec = {name: part for name, (part, _) in parts.items()}
            done |= {name: end for name, (_, end) in parts.items()}
            instances = instances_of(list(spec.values()))
        here = [spec[job_id] for job_id in pack.jobs]
        instance, kind = instances[pack.device], f" of {pack.device}" if plan.is_mixed else ""
        where = f"pack {n} (devices {device_range(pack.devices)}{kind}, {len(here)} jobs)"
        lines.append(f"{where}: J = {pack.J}: {why_slots(instance, pack, here)}.")
        lines.append(f"{where}: m = {pack.m}: {why_rows(instance, pack, here)}.")
        if pack.policy != "none":
            lines.append(f"{where}: {_why_policy(instance, pack, here)}.")
    return "\n".join(lines)


def _types(plan: Plan) -> list[str]:
    """Say what each device type does, and when it ends."""
    out = []
    for name, count in plan.device_types.items() if plan.is_mixed else ():
        packs = [pack for pack in plan.packs if pack.device == name]
        jobs = sum(len(pack.jobs) for pack in packs)
        end = f"ends after {duration(max(pack.end_s for pack in packs))}" if packs else "stays idle"
        out.append(f"{count} × {name}: {jobs} of {len(plan.jobs)} jobs, {end}.")
    return out


def _rungs(plan: Plan) -> list[str]:
    if plan.whole is None or plan.expected_s is None:
        return []
    return [
        f"planned rung by rung: at each rung all jobs wait, and those that go on are planned anew, with packs of "
        f"their own number and length; {duration(plan.expected_s)} expected, where whole jobs, whose packs run on "
        f"with empty slots, would take {duration(plan.whole['expected_s'])} (both simulated with the same stops; "
        f"{duration(plan.makespan_s)} and {duration(plan.whole['makespan_s'])} if none stops). The packs after "
        "rung 0 are those of that case alone."
    ]


def _bound(plan: Plan) -> str:
    reason = {
        "longest": "one job alone, run in its fastest way, takes that long: more devices would not help",
        "lp": "all devices busy all the time with every job in its cheapest program would take that long: "
        "more devices would help",
        "pigeonhole": "jobs are whole: some device group must take one more of them than the average",
        "groups": "no device group can be filled with packs so well that all its time is used: more devices would help",
    }[plan.bound]
    return f"no plan is shorter than {duration(plan.lower_bound_s)}: {reason}."


def why_slots(instance: Instance, pack: Pack, jobs: list[JobSpec]) -> str:
    """Say what limits the number of slots: jobs, memory, the longest job, or nothing more to gain."""
    need = instance.need(_counts(instance, jobs))
    limit = instance.slot_limit(pack.degree, pack.m, pack.policy, need)
    cost = instance.step_cost(pack.degree, pack.policy, need)
    row_s = pack.step_s / pack.J
    gain = cost.t0 / (pack.J * (pack.J + 1)) / row_s
    share = f"{100 * pack.memory_bytes / pack.memory_limit_bytes:.0f} % of the memory"
    if len(jobs) == pack.J:
        return f"number of jobs: every job has a slot, all run at once ({share})"
    if limit <= pack.J:
        return f"memory: no more slots of rank bucket {need.bucket} fit than {limit} ({share})"
    waves = -(-len(jobs) // pack.J)
    if -(-len(jobs) // (waves - 1)) > limit:
        return f"memory: at most {limit} slots fit, so {len(jobs)} jobs run in {waves} even waves ({share})"
    steps = sorted({job.micro_steps(pack.m) for job in jobs})
    if len(steps) > 1 and steps[-1] == pack.steps:
        return f"the longest job runs from first to last step, {pack.J - 1} slots beside it ({share})"
    if gain < SATURATED:
        return (
            f"saturation: another slot saves {100 * gain:.1f} % of a row's time; {waves} even waves ({share})"
        )
    return f"even waves: {len(jobs)} jobs in {waves} waves of {pack.J} leave the fewest slots idle ({share})"


def why_rows(instance: Instance, pack: Pack, jobs: list[JobSpec]) -> str:
    """Say what limits the rows of a slot: batch classes, memory, or that fewer slots would be filled."""
    divisor = batch_divisor(jobs)
    sizes = ", ".join(str(b) for b in sorted({job.batch_size for job in jobs}))
    if pack.m == divisor:
        return f"batch classes: the largest that divides every batch size here ({sizes})"
    need = instance.need(_counts(instance, jobs))
    larger = min(m for m in divisors(divisor) if m > pack.m)
    limit = instance.slot_limit(pack.degree, larger, pack.policy, need)
    if limit < pack.J:
        return f"memory: at m = {larger} {f'only {limit}' if limit else 'no'} slots would fit"
    return f"the jobs fill {pack.J} slots evenly; m = {larger} (batch sizes {sizes}) would not be faster"


def _why_policy(instance: Instance, pack: Pack, jobs: list[JobSpec]) -> str:
    need = instance.need(_counts(instance, jobs))
    keeping = instance.slot_limit(pack.degree, pack.m, "none", need)
    what = {"dots": "keeps matrix products and recomputes the rest", "layer": "recomputes whole layers"}
    if pack.policy == LAST_RESORT:
        step = step_shape(pack.degree, pack.J, pack.m, pack.policy, need)
        there = offloaded_bytes(instance.shape, step, instance.precision) / 2**30
        what[LAST_RESORT] = (
            f"recomputes whole layers, whose inputs wait in {there:.1f} GiB of the host's memory"
        )
    return f"the backward pass {what[pack.policy]}: keeping everything, {keeping} of {pack.J} slots would fit"


def _counts(instance: Instance, jobs: list[JobSpec]) -> tuple[tuple[int, int], ...]:
    class_of = {job_id: k for k, ids in enumerate(instance.members) for job_id in ids}
    total: dict[int, int] = {}
    for job in jobs:
        total[class_of[job.job_id]] = total.get(class_of[job.job_id], 0) + 1
    return tuple(sorted(total.items()))
