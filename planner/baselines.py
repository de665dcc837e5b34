"""What a sweep takes without this planner: one adapter per job in eager training, and simple uses of our own
step.
"""

import heapq

from planner.groups import Group, Solution, make_group, makespan
from planner.instance import Counts, Instance
from planner.pack import choose_pack


def eager_step_s(instance: Instance, k: int, degree: int) -> float:
    """Return a baseline's optimizer step: max(launch, tokens / rate), native batch, one adapter.

    launch is `launch_s` for 28 layers; the rate is `baseline_rate` of ours without recomputation.
    """
    job, cost, shape = instance.classes[k], instance.cost, instance.shape
    token_s = instance.step_cost(degree, "none", instance.need(((k, 1),))).c / cost.baseline_rate
    launch = cost.launch_s * shape.n_layers / 28
    return max(launch, job.batch_size * job.row_tokens * (1 + cost.padding) * token_s)


def _list_schedule(seconds: list[tuple[float, int]], machines: int) -> float:
    """Return when the last of (seconds, how many) jobs ends, longest first on the machine free first."""
    free = [0.0] * machines
    for s, n in sorted(seconds, reverse=True):
        for _ in range(n):
            heapq.heapreplace(free, free[0] + s)
    return max(free)


def one_adapter_s(instance: Instance, degree: int) -> float:
    """Return the makespan of one adapter per job on groups of one degree; every job loads the base anew."""
    jobs = []
    for k, n in instance.counts:
        steps = -(-instance.classes[k].rows // instance.classes[k].batch_size)
        seconds = steps * eager_step_s(instance, k, degree) + instance.eval_seconds(degree, k)
        jobs.append((seconds + instance.load_seconds(degree), n))
    return _list_schedule(jobs, instance.devices.count // degree)


def min_gpu_s(instance: Instance) -> float:
    """Return the makespan of Min GPU: the fewest devices on which every job fits, side by side."""
    K = range(len(instance.classes))
    return one_adapter_s(
        instance, min(d for d in instance.degrees if all(instance.fits_alone(k, d) for k in K))
    )


def max_gpu_s(instance: Instance) -> float:
    """Return the makespan of Max GPU: every job on as many devices as a group may have."""
    return one_adapter_s(instance, instance.degrees[-1])


def first_fit(instance: Instance) -> Solution | None:
    """Return first-fit-decreasing packs on our step: each job, longest first, joins the first pack with room.

    Packs hold one wave, all on the smallest degree; they go, longest first, to the group that is free first.
    """
    degree = min(d for d in instance.degrees if all(instance.fits_alone(k, d) for k, _ in instance.counts))
    open_packs: list[dict[int, int]] = []
    order = sorted(instance.counts, key=lambda item: (-_alone_s(instance, item[0], degree), item[0]))
    for k, n in order:
        full = 0
        for _ in range(n):
            while full < len(open_packs) and not _one_wave(instance, _add(open_packs[full], k), degree):
                full += 1
            if full == len(open_packs):
                open_packs.append({})
            open_packs[full][k] = open_packs[full].get(k, 0) + 1
    return spread(instance, [tuple(sorted(p.items())) for p in open_packs], degree)


def sequential(instance: Instance) -> Solution | None:
    """Return our step used for one job at a time, side by side on the smallest groups that fit every job."""
    degree = min(d for d in instance.degrees if all(instance.fits_alone(k, d) for k, _ in instance.counts))
    return spread(instance, [((k, 1),) for k, n in instance.counts for _ in range(n)], degree)


def spread(instance: Instance, packs: list[Counts], degree: int) -> Solution | None:
    """Put packs on groups of one degree, longest first, each on the group that is free first."""
    sized = []
    for n, counts in enumerate(packs):
        choice = choose_pack(instance, counts, degree)
        if choice is None:
            return None
        sized.append((choice.run_s, n))
    groups: list[list[Counts]] = [[] for _ in range(instance.devices.count // degree)]
    free = [(0.0, g) for g in range(len(groups))]
    for seconds, n in sorted(sized, key=lambda item: (-item[0], item[1])):
        load, g = free[0]
        groups[g].append(packs[n])
        heapq.heapreplace(free, (load + seconds + instance.cost.compile_s, g))
    made: list[Group | None] = [make_group(instance, degree, parts) for parts in groups if parts]
    return [group for group in made if group is not None]


def _add(counts: dict[int, int], k: int) -> Counts:
    return tuple(sorted({**counts, k: counts.get(k, 0) + 1}.items()))


def _alone_s(instance: Instance, k: int, degree: int) -> float:
    choice = choose_pack(instance, ((k, 1),), degree)
    return choice.run_s if choice else float("inf")


def _one_wave(instance: Instance, counts: Counts, degree: int) -> bool:
    """Say whether all the jobs fit side by side, one row a slot, keeping matrix products only."""
    need = instance.need(counts)
    return sum(n for _, n in counts) <= max(
        instance.slot_limit(degree, 1, p, need) for p in instance.policies
    )


def baselines(instance: Instance) -> tuple[dict[str, float | None], dict[str, Solution]]:
    """Return the seconds of the simple baselines, and the solutions of those that run on our step."""
    seconds: dict[str, float | None] = {"min_gpu_s": min_gpu_s(instance), "max_gpu_s": max_gpu_s(instance)}
    solutions: dict[str, Solution] = {}
    for name, solution in (("greedy", first_fit(instance)), ("sequential", sequential(instance))):
        seconds[f"{name}_s"] = makespan(solution) if solution else None
        if solution:
            solutions[name] = solution
    return seconds, solutions
