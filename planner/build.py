"""From a solution to a plan: job names, slots, seconds and device numbers."""

from collections.abc import Iterator

from planner.groups import Group, Solution, makespan
from planner.instance import Instance
from planner.pack import Choice, lay_out
from planner.plan import Assign, Pack, Plan
from planner.signature import length_bucket


def build_packs(instance: Instance, solution: Solution) -> tuple[Pack, ...]:
    """Name the jobs of every pack, place groups on devices, and date every job.

    Larger groups come first, so that groups of powers of two never straddle a host.
    """
    names = [iter(ids) for ids in instance.members]
    packs: list[Pack] = []
    device = 0
    for group in sorted(solution, key=lambda g: (-g.degree, -g.seconds)):
        packs.extend(_group_packs(instance, group, tuple(range(device, device + group.degree)), names))
        device += group.degree
    return tuple(packs)


def _group_packs(
    instance: Instance, group: Group, on: tuple[int, ...], names: list[Iterator[str]]
) -> Iterator[Pack]:
    clock = 0.0
    compiled: set[tuple] = set()
    for n, choice in enumerate(group.packs):
        setup = instance.load_seconds(group.degree) if n == 0 else 0.0
        setup += 0.0 if choice.program in compiled else instance.cost.compile_s
        compiled.add(choice.program)
        jobs = [(next(names[k]), k) for k, count in choice.counts for _ in range(count)]
        assign = date_jobs(instance, choice, jobs, clock + setup)
        end = clock + setup + choice.run_s
        need = choice.need
        yield Pack(
            jobs=tuple(a.job_id for a in assign),
            degree=group.degree,
            m=choice.m,
            policy=choice.policy,
            slots=(need.bucket,) * choice.J,
            length_buckets=tuple(
                sorted({length_bucket(instance.classes[k].max_row_tokens) for k, _ in choice.counts})
            ),
            row_tokens=need.S,
            step_s=choice.step_s,
            steps=choice.steps,
            assign=tuple(assign),
            devices=on,
            start_s=clock,
            end_s=end,
            setup_s=setup,
            memory_bytes=instance.memory(group.degree, choice.J, choice.m, choice.policy, need),
            memory_limit_bytes=instance.limit,
        )
        clock = end


def date_jobs(instance: Instance, choice: Choice, jobs: list[tuple[str, int]], start: float) -> list[Assign]:
    """Return when each job holds which slot: steps last `step_s`, and scoring a job pauses its whole pack."""
    steps = [instance.classes[k].micro_steps(choice.m) for _, k in jobs]
    _, slots = lay_out(steps, choice.J)
    spans = []
    for j, slot in enumerate(slots):
        at = 0
        for i in slot:
            spans.append((at + steps[i], at, j, i))
            at += steps[i]
    spans.sort()
    paused = 0.0
    starts: dict[tuple[int, int], float] = {}  # (slot, step) at which a slot becomes free -> seconds
    out = []
    for end_step, at, j, i in spans:
        paused += instance.eval_seconds(choice.degree, jobs[i][1])
        end = start + end_step * choice.step_s + paused
        out.append(Assign(jobs[i][0], j, starts.get((j, at), start), end))
        starts[(j, end_step)] = end
    return sorted(out, key=lambda a: (a.slot, a.start_s))


def build_plan(instance: Instance, solution: Solution, bound: float, kind: str, method: str, **more) -> Plan:
    """Make the plan of a solution."""
    jobs = {
        job.job_id: {
            "rank": job.rank, "batch_size": job.batch_size, "rows": job.rows, "row_tokens": job.row_tokens,
            "max_row_tokens": job.max_row_tokens, "data": job.data, "optimizer": job.optimizer,
            "targets": None if job.targets is None else sorted(job.targets),
            "has_dropout": job.has_dropout, "eval_tokens": job.eval_tokens,
        }
        for job in instance.jobs
    }  # fmt: skip
    return Plan(
        makespan_s=makespan(solution),
        lower_bound_s=bound,
        bound=kind,
        packs=build_packs(instance, solution),
        jobs=jobs,
        device=instance.devices.spec.name,
        device_count=instance.devices.count,
        model=instance.shape.name,
        precision=instance.precision,
        method=method,
        **more,
    )
