"""From placed packs to a plan: job names, slots and seconds."""

from collections.abc import Iterator, Sequence
from typing import Any

from planner.devices import Devices, Mixture
from planner.instance import Instance
from planner.ours import Bound
from planner.pack import Choice, lay_out
from planner.placed import Placed
from planner.plan import Assign, Pack, Plan
from planner.signature import length_bucket

Names = Sequence[Iterator[str]]  # of the jobs of each class


def build_packs(instance: Instance, placed: list[Placed], names: Names) -> list[Pack]:
    """Name the jobs of every pack, by the next of the names, and date every job."""
    packs = []
    for item in placed:
        choice, need = item.choice, item.choice.need
        jobs = [(next(names[k]), k) for k, count in choice.counts for _ in range(count)]
        assign = date_jobs(instance, choice, jobs, item.start_s + item.setup_s)
        lengths = {length_bucket(instance.classes[k].max_row_tokens) for k, _ in choice.counts}
        packs.append(
            Pack(
                jobs=tuple(a.job_id for a in assign),
                degree=choice.degree,
                m=choice.m,
                policy=choice.policy,
                slots=(need.bucket,) * choice.J,
                length_buckets=tuple(sorted(lengths)),
                row_tokens=need.S,
                step_s=choice.step_s,
                steps=choice.steps,
                assign=tuple(assign),
                devices=tuple(instance.first + device for device in item.devices),
                start_s=item.start_s,
                end_s=item.end_s,
                setup_s=item.setup_s,
                memory_bytes=instance.memory(choice.degree, choice.J, choice.m, choice.policy, need),
                memory_limit_bytes=instance.limit,
                device=instance.devices.spec.name,
            )
        )
    return packs


def job_names(instance: Instance) -> Names:
    """Return the names of the jobs of each class."""
    return [iter(ids) for ids in instance.members]


def date_jobs(instance: Instance, choice: Choice, jobs: list[tuple[str, int]], start: float) -> list[Assign]:
    """Return when each job holds which slot: steps last `step_s`, and scoring a job pauses its whole pack."""
    steps_of = instance.steps(choice.m)
    steps = [steps_of[k] for _, k in jobs]
    _, slots = lay_out(steps, choice.J)
    spans = []
    for j, slot in enumerate(slots):
        at = 0
        for i in slot:
            spans.append((at + steps[i], j, at, i))
            at += steps[i]
    spans.sort()  # jobs that end at one step are scored slot by slot
    paused = 0.0
    starts: dict[tuple[int, int], float] = {}  # (slot, step) at which a slot becomes free -> seconds
    out = []
    for end_step, j, at, i in spans:
        scoring = instance.eval_seconds(choice.degree, jobs[i][1])
        paused += scoring
        end = start + end_step * choice.step_s + paused
        out.append(Assign(jobs[i][0], j, starts.get((j, at), start), end, scoring))
        starts[(j, end_step)] = end
    return sorted(out, key=lambda a: (a.slot, a.start_s))


def all_packs(instances: Sequence[Instance], placed: Sequence[list[Placed]]) -> tuple[Pack, ...]:
    """Return the packs placed on the devices of each type, which are instances of the same jobs."""
    names, packs = job_names(instances[0]), []
    for instance, own in zip(instances, placed, strict=True):
        packs += build_packs(instance, own, names)
    if lost := [name for rest in names for name in rest]:  # never; and never silently
        raise AssertionError(f"the search lost jobs {lost}")
    return tuple(packs)


def build_plan(
    instances: Sequence[Instance],
    placed: Sequence[list[Placed]],
    devices: Devices | Mixture,
    bound: Bound,
    method: str,
    **more: Any,
) -> Plan:
    """Make the plan of the packs placed on the devices of each type."""
    jobs = {
        job.job_id: {
            "rank": job.rank,
            "batch_size": job.batch_size,
            "rows": job.rows,
            "row_tokens": job.row_tokens,
            "max_row_tokens": job.max_row_tokens,
            "data": job.data,
            "optimizer": job.optimizer,
            "targets": None if job.targets is None else sorted(job.targets),
            "has_dropout": job.has_dropout,
            "eval_tokens": job.eval_tokens,
        }
        for job in instances[0].jobs
    }
    packs = all_packs(instances, placed)
    prices = zip(bound.prices.tolist(), instances[0].members, strict=True) if bound.kind == "groups" else ()
    return Plan(
        makespan_s=max(pack.end_s for pack in packs),
        lower_bound_s=bound.seconds,
        bound=bound.kind,
        packs=packs,
        jobs=jobs,
        device="+".join(part.spec.name for part in devices.parts),
        device_count=devices.count,
        device_types={part.spec.name: part.count for part in devices.parts},
        model=instances[0].shape.name,
        precision=instances[0].precision,
        method=method,
        prices={name: price for price, ids in prices for name in ids},
        **more,
    )
