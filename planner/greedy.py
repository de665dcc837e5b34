"""Our greedy: jobs in a line, sorted by what they can share, cut into equal device loads.

For a target time C every group takes the longest run of jobs that it finishes within C; a bisection finds the
least C for which the devices suffice. Lines sorted in several ways and every degree are tried, and mixtures
of degrees by a shortest path over the line where it is short.
"""

from collections.abc import Callable
from itertools import accumulate

from planner.errors import PlanError
from planner.groups import Group, Place, Solution, makespan, put, split_group
from planner.instance import Counts, Instance

PRECISE = 4e-3  # relative width at which the bisection stops
KEEP = 1.06
RISES = (1.03, 1.1, 1.3, 2.0)  # times the lower bound: the first limits that are tried
MIXED_JOBS = 100  # the longest line on which mixtures of degrees are searched


class Line:
    """Hold the jobs in one order: (class, count) items, addressed by position; a class may come again."""

    def __init__(self, instance: Instance, items: Counts) -> None:
        self.instance = instance
        self.order = [k for k, _ in items]
        self.ends = list(accumulate(n for _, n in items))
        self.n = self.ends[-1]
        starts = [0, *self.ends[:-1]]
        self.class_at = [
            i for i, (a, b) in enumerate(zip(starts, self.ends, strict=True)) for _ in range(b - a)
        ]

    def items(self, i: int, j: int) -> Counts:
        """Return the jobs at positions i to j as counts, in the line's order."""
        out = []
        while i < j:
            at = self.class_at[i]
            upto = min(j, self.ends[at])
            out.append((self.order[at], upto - i))
            i = upto
        return tuple(out)

    def group(self, i: int, j: int, degree: int) -> Group | None:
        """Return the best group for the jobs at positions i to j."""
        return split_group(self.instance, self.items(i, j), degree)

    def furthest(self, i: int, degree: int, C: float, guess: int) -> int:
        """Return the largest j such that jobs i to j finish within C on one group; i where none does."""

        def within(j: int) -> bool:
            group = self.group(i, j, degree)
            return group is not None and group.seconds <= C

        low, step = i, max(1, guess)
        high = min(self.n, i + step)
        while within(high):
            low = high
            if high == self.n:
                return high
            high = min(self.n, high + max(1, step // 4))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low


def orders(instance: Instance) -> list[Counts]:
    """Return all jobs in several orders: length first, then batch or rank or length of run first.

    Jobs that only large groups hold come before all others, as large groups come first in a pattern.
    """
    jobs = instance.classes
    keys: list[Callable[[int], tuple]] = [
        lambda k: (jobs[k].row_tokens, jobs[k].data, jobs[k].batch_size, jobs[k].bucket, jobs[k].rows),
        lambda k: (jobs[k].row_tokens, jobs[k].data, jobs[k].bucket, jobs[k].batch_size, jobs[k].rows),
        lambda k: (jobs[k].row_tokens, jobs[k].data, jobs[k].rows, jobs[k].bucket, jobs[k].batch_size),
        lambda k: (jobs[k].batch_size, jobs[k].row_tokens, jobs[k].data, jobs[k].bucket, jobs[k].rows),
        lambda k: (jobs[k].bucket, jobs[k].row_tokens, jobs[k].batch_size, jobs[k].rows),
    ]
    least = [next(d for d in instance.degrees if instance.fits_alone(k, d)) for k in range(len(jobs))]
    out: list[Counts] = []
    for key in keys:
        items = tuple(sorted(instance.counts, key=lambda item: (-least[item[0]], *key(item[0]), item[0])))
        if items not in out:
            out.append(items)
    return out


Pattern = tuple[Place, ...]


def patterns(instance: Instance) -> list[Pattern]:
    """Return the lists of groups to try: as many of one degree as there are devices for, smaller ones after."""
    out = []
    for degree in instance.degrees:
        groups, left = [], instance.devices.count
        for d in (degree, *reversed(instance.degrees)):
            groups += [d] * (left // d)
            left %= d
        out.append(places(instance, sorted(groups, reverse=True)))
    return list(dict.fromkeys(out))


def places(instance: Instance, degrees: list[int]) -> Pattern:
    """Return places for groups, the largest first; where devices are busy, on those that are free first.

    A group's devices are a block whose number of the first is a multiple of their number.
    """
    if not instance.busy:
        return tuple(Place(d) for d in degrees)
    free, out = set(range(instance.devices.count)), []
    for d in degrees:
        blocks = [tuple(range(a, a + d)) for a in range(0, instance.devices.count - d + 1, d)]
        on = min(
            (b for b in blocks if free.issuperset(b)), key=lambda b: (instance.free_at(b), b), default=None
        )
        if on is not None:
            free.difference_update(on)
            out.append(Place(d, on, instance.free_at(on)))
    return tuple(out)


def cut(line: Line, pattern: Pattern, C: float) -> Solution | None:
    """Cut a line into groups of the pattern, each within C; None where they do not suffice."""
    solution: Solution = []
    i, guess = 0, max(1, line.n // len(pattern))
    for place in pattern:
        j = line.furthest(i, place.degree, C - place.start, guess)
        if j == i:
            continue
        group = line.group(i, j, place.degree)
        assert group is not None
        solution.append(put(group, place))
        i, guess = j, j - i
        if i == line.n:
            return solution
    return None


def cut_mixed(line: Line, degrees: tuple[int, ...], C: float, count: int) -> Solution | None:
    """Cut a line into groups of any degrees on `count` devices, each within C: a shortest path in devices."""
    best: list[tuple[int, int, Group | None] | None] = [None] * (line.n + 1)
    best[0] = (0, -1, None)
    for i in range(line.n):
        here = best[i]
        if here is None:
            continue
        for d in degrees:
            used = here[0] + d
            if used > count:
                break
            j = line.furthest(i, d, C, max(1, line.n * d // count))
            there = best[j]
            if j > i and (there is None or used < there[0]):
                best[j] = (used, i, line.group(i, j, d))
    if best[line.n] is None:
        return None
    solution: Solution = []
    at = line.n
    while at > 0:
        step = best[at]
        assert step is not None and step[2] is not None
        solution.append(step[2])
        at = step[1]
    return solution[::-1]


def bisect(attempt: Callable[[float], Solution | None], low: float, high: Solution) -> Solution:
    """Return a solution whose makespan is within PRECISE of the least for which `attempt` succeeds."""
    best = high
    while makespan(best) > low * (1 + PRECISE):
        C = (low + makespan(best)) / 2
        found = attempt(C)
        if found is None:
            low = C
        elif makespan(found) < makespan(best):
            best = found
        else:
            break
    return best


Found = dict[Pattern, Solution]  # the best solution of each pattern of groups; (): any mixture


def cut_line(instance: Instance, items: Counts, found: Found, low: float) -> None:
    """Cut one line in each pattern, and in any mixture of degrees where it is short; keep what is better in `found`.

    A pattern whose best is more than KEEP above the best of all is given up early.
    """
    line = Line(instance, items)
    attempts: dict[Pattern, Callable[[float], Solution | None]] = {
        pattern: lambda C, pattern=pattern: cut(line, pattern, C)  # type: ignore[misc]
        for pattern in patterns(instance)
    }
    if line.n <= MIXED_JOBS and len(instance.degrees) > 1 and not instance.busy:
        many = line.n >= 4 * instance.devices.count  # large groups are for few jobs
        degrees = instance.degrees[:2] if many else instance.degrees
        attempts[()] = lambda C: cut_mixed(line, degrees, C, instance.devices.count)
    for pattern, attempt in attempts.items():
        own = makespan(found[pattern]) if pattern in found else float("inf")
        best = min(map(makespan, found.values()), default=float("inf"))
        # far above the bound an attempt is long and its bisection longer
        limits = (
            [min(own * (1 - PRECISE), best * KEEP)]
            if found
            else [*(low * rise for rise in RISES if low), 1e15]
        )
        start = next(filter(None, map(attempt, limits)), None)
        if start is not None:
            found[pattern] = bisect(attempt, low, start)


def greedy(instance: Instance, low: float = 0.0, most: int = 5) -> Found:
    """Return the best cut of each pattern over the first `most` orders; `low` is a lower bound on the makespan.

    Raises:
        PlanError: no pattern of groups takes every job: too few devices for the jobs that need a large group.
    """
    found: Found = {}
    for items in orders(instance)[:most]:
        cut_line(instance, items, found, low)
    if not found:
        raise PlanError("no division of the devices into groups holds every job; use more devices")
    return found
