"""What a sweep takes without this planner: one adapter per job in eager training, and simple uses of our own
step.
"""

import heapq
from collections.abc import Callable, Sequence

from planner.groups import Group, Solution, make_group
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


def _list_schedule(
    instances: Sequence[Instance], degrees: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[float, list[Counts]]:
    """Deal single jobs, the longest at its best type first, to the group of any type on which each then ends first.

    `seconds(n, k)` is what a job of class k takes on a group of instance n. Returns when the last ends, and the jobs of
    each type.
    """
    took = [[seconds(n, k) for k, _ in instances[0].counts] for n in range(len(instances))]
    free = [[0.0] * (one.devices.count // d) for one, d in zip(instances, degrees, strict=True)]
    dealt: list[dict[int, int]] = [{} for _ in instances]
    order = sorted((min(own[k] for own in took), k, count) for k, count in instances[0].counts)
    for _, k, count in reversed(order):
        for _ in range(count):
            n = min((n for n in range(len(free)) if free[n]), key=lambda n: (free[n][0] + took[n][k], n))
            heapq.heapreplace(free[n], free[n][0] + took[n][k])
            dealt[n][k] = dealt[n].get(k, 0) + 1
    return max(map(max, filter(None, free))), [tuple(sorted(own.items())) for own in dealt]


def one_adapter_s(instances: Sequence[Instance], degrees: Sequence[int]) -> float:
    """Return the makespan of one adapter per job on groups of one degree a type; every job loads the base anew."""

    def seconds(n: int, k: int) -> float:
        instance, degree = instances[n], degrees[n]
        if not instance.fits_alone(k, degree):
            return float("inf")
        steps = -(-instance.classes[k].rows // instance.classes[k].batch_size)
        run_s = steps * eager_step_s(instance, k, degree) + instance.eval_seconds(degree, k)
        return run_s + instance.load_seconds(degree)

    return _list_schedule(instances, degrees, seconds)[0]


def fewest(instance: Instance) -> int:
    """Return the fewest devices on which every job fits that fits any group."""
    K = [k for k, _ in instance.counts if instance.fits(k)]
    return min(d for d in instance.degrees if all(instance.fits_alone(k, d) for k in K))


def min_gpu_s(instances: Sequence[Instance]) -> float:
    """Return the makespan of Min GPU: the fewest devices on which every job fits, side by side."""
    return one_adapter_s(instances, [fewest(instance) for instance in instances])


def max_gpu_s(instances: Sequence[Instance]) -> float:
    """Return the makespan of Max GPU: every job on as many devices as a group may have."""
    return one_adapter_s(instances, [instance.degrees[-1] for instance in instances])


def dealt_singly(instances: Sequence[Instance]) -> list[Counts]:
    """Return the jobs of each type, dealt as if each ran alone on our step."""
    degrees = [fewest(instance) for instance in instances]
    return _list_schedule(instances, degrees, lambda n, k: _alone_s(instances[n], k, degrees[n]))[1]


def first_fit(instance: Instance) -> Solution | None:
    """Return first-fit-decreasing packs on our step: each job, longest first, joins the first pack with room.

    Packs hold one wave, all on the smallest degree; they go, longest first, to the group that is free first.
    """
    degree = fewest(instance)
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
    degree = fewest(instance)
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
