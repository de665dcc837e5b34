"""Devices of several types: which jobs each type does, so that all end together.

There is one instance a type, with all the jobs, its own cost table, memory and degrees; no group spans two types. The
joint configuration LP (config_lp.py) bounds the makespan and deals the jobs. Dealt jobs are planned by our method, a
type at a time, and what each type then takes beyond the LP corrects the next deal. In the end single jobs of the
slowest group go to other types, wherever that is faster.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.bound import lower_bound
from planner.config_lp import Types, share, shared_bound
from planner.errors import PlanError
from planner.exact import exact_shared, is_small
from planner.fill import make_tables
from planner.greedy import Line, greedy
from planner.groups import Group, Place, Solution, insert, make_group, makespan, put, unused
from planner.incumbent import repair
from planner.instance import Counts, Instance
from planner.ours import GOAL, HEAT, Bound, Effort, bounds, ours
from planner.pack import merge_counts
from planner.plan import Pack
from planner.recut import pooled_line, recut
from planner.search import improve, take
from planner.specs import JobSpec

DEALS = 4  # deals of all jobs, each corrected by the one before
ABOVE = 1.02  # of the bound, for which the LP deals
TRADES = 0.8  # share of the rounds between two types in which single jobs are traded
TARGETS = 4  # groups of another type, those that end first, that a job may go to
MOVES = 8  # rounds between types for each that re-cuts groups of one type
ROUNDS = 3  # of moves between types and local search within each


def check_fits(instances: Sequence[Instance]) -> None:
    """Raise PlanError where a job fits no device of any type; the message says for each type what would hold it."""
    for k, job in enumerate(instances[0].classes):
        if any(instance.fits(k) for instance in instances):
            continue
        reasons = []
        for instance in instances:
            try:
                _ = instance.of([job]).degrees
            except PlanError as error:
                reasons.append(str(error))
        raise PlanError("; ".join(reasons))


def mixed_bound(instances: Sequence[Instance], types: Sequence[Types]) -> Bound:
    """Return the largest of the longest job, the joint pigeonhole bound and the joint configuration LP."""
    first = min(min(instance.busy, default=0.0) for instance in instances)
    seconds, kind = lower_bound(instances)
    seconds += first
    lp = shared_bound(instances, types, seconds)
    if lp > seconds:
        seconds, kind = lp, "lp"
    return Bound(seconds, kind, np.zeros(0), {})


def mixed(
    instances: Sequence[Instance],
    types: Sequence[Types],
    bound: Bound,
    effort_for: Callable[[Instance], Effort],
    start: list[Solution] | None = None,
    deadline: float = float("inf"),
) -> tuple[list[Solution], str, bool]:
    """Return each type's solution, in the classes of all jobs, the step that found them, and whether the deadline cut
    the search; `start` takes part where given.
    """
    if all(is_small(instance) for instance in instances):
        return exact_shared(instances), "exact", False
    goal = bound.seconds * GOAL
    best = min(deals(instances, types, bound), key=mixed_makespan)
    methods: list[str] = []
    cut = False

    def plan(own: Instance) -> Solution:
        nonlocal cut
        solution, method, truncated = ours(own, bounds(own), effort_for(own), deadline=deadline)
        methods.append(method)
        cut = cut or truncated
        return solution

    solutions = [
        on_type(instance, any_of(instance, all_jobs(dealt)), plan)
        for instance, dealt in zip(instances, best, strict=True)
    ]
    name = " + ".join(dict.fromkeys(methods))
    if start is not None and mixed_makespan(start) < mixed_makespan(solutions):
        solutions, name = start, "incumbent"
    worth = share(instances, types, bound.seconds * ABOVE, 0.0).worth
    all_tables = [
        make_tables(one, own, mixed_makespan(solutions)) for one, own in zip(instances, types, strict=True)
    ]
    for n in range(ROUNDS):
        if mixed_makespan(solutions) <= goal or time.perf_counter() > deadline:
            break
        efforts = [effort_for(instance) for instance in instances]
        tries = [effort.proposals // ROUNDS for effort in efforts]
        moved = recut_between(instances, solutions, MOVES * sum(e.recuts for e in efforts) // ROUNDS, n, goal)
        moved = [
            recut(one, tables, prices, solution, effort.recuts // ROUNDS, n, goal)
            for one, tables, prices, solution, effort in zip(
                instances, all_tables, worth, moved, efforts, strict=True
            )
        ]
        moved = [
            improve(one, solution, tries, n, HEAT / one.devices.count, goal) if solution else solution
            for one, solution, tries in zip(instances, moved, tries, strict=True)
        ]
        if mixed_makespan(moved) < mixed_makespan(solutions) * (1 - 1e-9):
            solutions, name = moved, "moves between types"
    return solutions, name, cut


def mixed_makespan(solutions: Sequence[Solution]) -> float:
    """Return when the last type ends."""
    return max(map(makespan, solutions))


def deals(instances: Sequence[Instance], types: Sequence[Types], bound: Bound) -> list[list[Solution]]:
    """Return a few deals of all jobs, cut greedily; every one is corrected by how long the types took for the last."""
    C, slower = bound.seconds * ABOVE, [1.0] * len(instances)
    out: list[list[Solution]] = []
    for _ in range(DEALS):
        shares = share(instances, types, C, 0.0, slower)
        if not np.isfinite(shares.seconds):
            break
        split = rounded(shares.jobs, np.array([n for _, n in instances[0].counts]))
        out.append(
            [
                on_type(instance, any_of(instance, own), _greedy)
                for instance, own in zip(instances, split, strict=True)
            ]
        )
        for n, (instance, solution) in enumerate(zip(instances, out[-1], strict=True)):
            load = min(instance.load_seconds(d) for d in instance.degrees)
            took = (makespan(solution) - load) / (shares.seconds - load)
            slower[n] *= min(max(took, 0.5), 2.0)
    return out


def rounded(jobs: np.ndarray, counts: np.ndarray) -> list[Counts]:
    """Round the jobs [type, class] of a deal to whole ones; what is cut off counts in the next class."""
    carried = np.zeros(len(jobs))
    out: list[dict[int, int]] = [{} for _ in jobs]
    for k, n in enumerate(counts):
        wanted = np.where(jobs[:, k] > 1e-9, jobs[:, k] + carried, -np.inf)
        whole = np.floor(jobs[:, k] + 1e-9).astype(int)
        for _ in range(int(n) - int(whole.sum())):
            whole[int((wanted - whole).argmax())] += 1
        carried += jobs[:, k] - whole
        for own, count in zip(out, whole.tolist(), strict=True):
            if count:
                own[k] = count
    return [tuple(own.items()) for own in out]


def on_type(
    instance: Instance, jobs: Sequence[JobSpec], plan: Callable[[Instance], Solution | None]
) -> Solution:
    """Return what `plan` makes of some of an instance's jobs as a problem of their own, in the instance's classes.

    Raises:
        PlanError: no plan was made.
    """
    if not jobs:
        return []
    found = plan(instance.of(list(jobs)))
    if found is None:
        raise PlanError(f"{instance.devices} hold no such groups of the jobs dealt to them")
    # the classes of the problem are the instance's own, in the same order, without those that have no job in it
    class_of = {job_id: k for k, ids in enumerate(instance.members) for job_id in ids}
    names = sorted({class_of[job.job_id] for job in jobs})
    return [_renamed(instance, group, names) for group in found]


def any_of(instance: Instance, counts: Counts) -> list[JobSpec]:
    """Return jobs by their numbers in each class; which ones of a class does not matter."""
    return [instance.classes[k] for k, n in counts for _ in range(n)]


def _renamed(instance: Instance, group: Group, names: list[int]) -> Group:
    parts = [tuple((names[k], n) for k, n in pack.counts) for pack in group.packs]
    made = make_group(instance, group.degree, parts, group.on)
    assert made is not None
    return made


def _greedy(instance: Instance) -> Solution:
    return min(greedy(instance).values(), key=makespan)


def all_jobs(solution: Solution) -> Counts:
    """Return the jobs of a solution."""
    return merge_counts(*(pack.counts for group in solution for pack in group.packs))


def recut_between(
    instances: Sequence[Instance], solutions: Sequence[Solution], rounds: int, seed: int, goal: float
) -> list[Solution]:
    """Return solutions no slower: each round takes a group, mostly the slowest, and one of another type, and trades
    single jobs between them or cuts the jobs of both anew, along a line in random order; what makes the slower of both
    faster is kept.
    """
    rng = random.Random(seed)
    solutions = [list(solution) for solution in solutions]
    for _ in range(rounds if len(instances) > 1 else 0):
        if mixed_makespan(solutions) <= goal:
            break
        a = max(range(len(solutions)), key=lambda n: makespan(solutions[n]))
        g = max(range(len(solutions[a])), key=lambda g: solutions[a][g].seconds)
        if rng.random() > 0.7:
            g = rng.randrange(len(solutions[a]))
        b = rng.choice([n for n in range(len(solutions)) if n != a])
        places = [Place(group.degree, group.on) for group in solutions[b]] + unused(
            instances[b], solutions[b]
        )[:1]
        if not places:  # all its devices are busy, or too few for a group
            continue
        h = rng.randrange(len(places))
        mine = solutions[a][g]
        theirs = solutions[b][h] if h < len(solutions[b]) else Group(places[h].degree, (), 0.0, places[h].on)
        pooled = merge_counts(*(pack.counts for group in (mine, theirs) for pack in group.packs))
        worst = max(mine.seconds, theirs.seconds) * (1 - 1e-4)
        one, other = (instances[a], mine), (instances[b], theirs)
        if rng.random() < TRADES:
            found = _trade(one, other, rng)
        else:
            found = _cut_between(one, other, pooled_line(instances[a], pooled, rng), worst)
        if found is None or makespan(list(found)) > worst:
            continue
        for n, at, group in ((a, g, found[0]), (b, h, found[1])):
            solutions[n][at : at + 1] = [group] if group.packs else []
    return solutions


def _cut_between(
    one: tuple[Instance, Group], other: tuple[Instance, Group], items: Counts, worst: float
) -> tuple[Group, Group] | None:
    """Cut a line of jobs between two groups where the later of them ends earliest; None where that is after `worst`."""
    lines = [Line(instance, items) for instance, _ in (one, other)]

    def group(n: int, i: int, j: int) -> Group | None:
        instance, was = (one, other)[n]
        if i == j:
            return Group(was.degree, (), 0.0, was.on)
        made = lines[n].group(i, j, was.degree)
        return made and put(made, Place(was.degree, was.on, instance.free_at(was.on)))

    low, high = 0, lines[0].n  # the first group has more jobs than `low` only where it ends first
    best: tuple[Group, Group] | None = None
    while low <= high:
        middle = (low + high) // 2
        first, second = group(0, 0, middle), group(1, middle, lines[0].n)
        ends = [made.seconds if made else float("inf") for made in (first, second)]
        if first and second and max(ends) < worst:
            best, worst = (first, second), max(ends)
        low, high = (middle + 1, high) if ends[0] < ends[1] else (low, middle - 1)
    return best


def _trade(
    one: tuple[Instance, Group], other: tuple[Instance, Group], rng: random.Random
) -> tuple[Group, Group] | None:
    """Give a job of one group to the other, at times against one of its own; None where one fits nowhere there."""
    sides = [one, other] if other[1].packs and rng.random() < 0.5 else [one]
    out, given = [one[1], other[1]], []
    for n, (instance, group) in enumerate(sides):
        p = rng.randrange(len(group.packs))
        k, _ = rng.choice(group.packs[p].counts)
        parts = [pack.counts for pack in group.packs]
        parts[p] = take(parts[p], k, 1)
        left = make_group(instance, group.degree, parts, group.on)
        if left is None:
            return None
        out[n] = left if left.packs else Group(group.degree, (), 0.0, group.on)
        given.append(k)
    for n, k in enumerate(given):
        instance, there = (other, one)[n][0], [out[1 - n]]
        if not instance.fits(k) or not insert(instance, there, k):
            return None
        out[1 - n] = there[0]
    return out[0], out[1]


def _with_one(instance: Instance, solution: Solution, k: int) -> Solution | None:
    """Return a solution with a job more of a class, in one of the groups that end first or on devices without any."""
    free = [Group(place.degree, (), 0.0, place.on) for place in unused(instance, solution)[:1]]
    order = sorted(range(len(solution)), key=lambda g: (solution[g].seconds, g))
    few = [*free, *(solution[g] for g in order[:TARGETS])]
    if not insert(instance, few, k):
        return None
    return [group for group in few if group.packs] + [solution[g] for g in order[TARGETS:]]


def repair_mixed(instances: Sequence[Instance], packs: Sequence[Pack]) -> list[Solution] | None:
    """Return the groups of an earlier plan on the types that they were on, with the jobs that still exist and fit
    there, and every other job where it ends earliest; None where some job finds no place.
    """
    class_of = {job_id: k for k, ids in enumerate(instances[0].members) for job_id in ids}
    specs = {job.job_id: job for job in instances[0].jobs}
    left, solutions = dict(class_of), []
    for instance in instances:
        mine = [
            replace(pack, devices=tuple(device - instance.first for device in pack.devices))
            for pack in packs
            if pack.device == instance.devices.spec.name
        ]
        kept = [name for pack in mine for name in pack.jobs if name in left and instance.fits(left[name])]
        for name in kept:
            del left[name]
        solutions.append(
            on_type(instance, [specs[name] for name in kept], lambda own, mine=mine: repair(own, mine))  # type: ignore[misc]
        )
    for k in left.values():
        ways = [
            (makespan(there), n, there)
            for n, instance in enumerate(instances)
            if instance.fits(k) and (there := _with_one(instance, solutions[n], k)) is not None
        ]
        if not ways:
            return None
        _, n, there = min(ways, key=lambda way: way[:2])
        solutions[n] = there
    return solutions
