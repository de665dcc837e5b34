"""One pack: given its jobs and degree, choose m, J and recompute policy, and lay the jobs into slots."""

import heapq
from typing import NamedTuple

from planner.instance import Counts, Instance, Need

EXACT_JOBS = 10  # packs of so few jobs are laid out exactly


class Choice(NamedTuple):
    """Hold a pack as chosen: its jobs by class, its program, micro-steps and seconds without compilation."""

    counts: Counts
    degree: int
    m: int
    J: int
    policy: str
    need: Need
    steps: int
    step_s: float
    run_s: float  # steps · step_s, and scoring and exporting every job

    @property
    def program(self) -> tuple:
        """Return what identifies the compiled program; equal programs of a group compile once."""
        return (self.m, self.J, self.policy, self.need)


def lay_out(steps: list[int], J: int) -> tuple[int, list[list[int]]]:
    """Lay jobs (by micro-steps) into J slots, longest first onto the emptiest slot.

    Returns the pack's micro-steps and, per slot, the indices of its jobs in order. Longest first is within
    4/3 of the best; for ten jobs or fewer a branch and bound finds the best.
    """
    order = sorted(range(len(steps)), key=lambda i: (-steps[i], i))
    heap = [(0, j) for j in range(J)]
    slots: list[list[int]] = [[] for _ in range(J)]
    longest = 0
    for i in order:
        load, j = heap[0]
        slots[j].append(i)
        heapq.heapreplace(heap, (load + steps[i], j))
        longest = max(longest, load + steps[i])
    floor = max(steps[order[0]], -(-sum(steps) // J))
    if len(steps) > EXACT_JOBS or longest == floor:
        return longest, slots
    return _exact_layout(steps, order, J, floor, longest, slots)


def _exact_layout(
    steps: list[int], order: list[int], J: int, floor: int, best: int, best_slots: list[list[int]]
) -> tuple[int, list[list[int]]]:
    """Improve a layout of few jobs to the best one; slots of equal load are tried once.

    A branch ends where the room left under the best known length cannot hold the steps still to place.
    """
    after = [sum(steps[i] for i in order[n:]) for n in range(len(order) + 1)]
    loads = [0] * J
    slots: list[list[int]] = [[] for _ in range(J)]

    def place(position: int) -> None:
        nonlocal best, best_slots
        if position == len(order):
            best, best_slots = max(loads), [list(slot) for slot in slots]
            return
        if sum(max(0, best - 1 - load) for load in loads) < after[position]:
            return
        i = order[position]
        tried = set()
        for j in range(J):
            if loads[j] in tried or loads[j] + steps[i] >= best:
                continue
            tried.add(loads[j])
            loads[j] += steps[i]
            slots[j].append(i)
            place(position + 1)
            slots[j].pop()
            loads[j] -= steps[i]
            if best == floor:
                return

    place(0)
    return best, best_slots


def pack_steps(instance: Instance, tally: tuple[tuple[int, int], ...], J: int) -> int:
    """Return the micro-steps of a pack of J slots for jobs given as ((micro-steps, how many), …), longest
    first.

    The same as `lay_out`, without the layout.
    """
    if len(tally) == 1:
        steps, n = tally[0]
        return -(-n // J) * steps
    key = (tally, J)
    if key not in instance.layouts:
        expanded = [s for s, n in tally for _ in range(n)]
        if len(expanded) <= EXACT_JOBS:
            instance.layouts[key] = lay_out(expanded, J)[0]
        else:
            loads = [0] * J
            for s in expanded:
                heapq.heapreplace(loads, loads[0] + s)
            instance.layouts[key] = max(loads)
    return instance.layouts[key]


def slot_counts(tally: tuple[tuple[int, int], ...], N: int, work: int, limit: int) -> list[int]:
    """Return the numbers of slots worth trying for jobs given as ((micro-steps, how many), …), at most
    `limit`.

    Equal jobs run in waves: the least J for each small number of waves (waves evened out). Unequal ones:
    about as many slots as the longest job's length leaves work for, since beyond it slots only idle. Few
    jobs: all.
    """
    top = min(N, limit)
    if N <= EXACT_JOBS:
        return list(range(top, 0, -1))
    if len(tally) == 1:
        waves = -(-N // top)
        return [-(-N // w) for w in range(waves, min(waves + 3, N + 1))]
    ideal = work // tally[0][0]
    return sorted({min(max(J, 1), top) for J in (ideal, ideal + 1, ideal + 1 + ideal // 8)}, reverse=True)


def choose_pack(instance: Instance, counts: Counts, degree: int) -> Choice | None:
    """Choose m, J and policy for the least time of one pack; None where it fits in no way.

    Of equal times the fewest slots win, which leaves memory free. m runs over the divisors of every batch
    size.
    """
    key = (counts, degree)
    if key in instance.packs:
        return instance.packs[key]
    need = instance.need(counts)
    scored = instance.scoring(degree)
    scoring = sum([n * scored[k] for k, n in counts])
    N = sum([n for _, n in counts])
    best: tuple | None = None
    least = float("inf")
    for m, options in instance.programs(degree, need):
        count_of: dict[int, int] = {}
        steps_of = instance.steps(m)
        for k, n in counts:
            s = steps_of[k]
            count_of[s] = count_of.get(s, 0) + n
        tally = tuple(sorted(count_of.items(), reverse=True)) if len(count_of) > 1 else (*count_of.items(),)
        work = sum([s * n for s, n in tally])
        longest = tally[0][0]
        for t0, slot_s, limit, policy in options:
            if work * slot_s + longest * t0 >= least:  # with any number of slots
                continue
            for J in slot_counts(tally, N, work, limit):
                step_s = t0 + J * slot_s
                if longest * step_s >= least or -(-work // J) * step_s >= least:
                    continue
                steps = pack_steps(instance, tally, J)
                if steps * step_s < least:
                    least = steps * step_s
                    best = (m, J, policy, steps, step_s)
    choice = None
    if best is not None:
        m, J, policy, steps, step_s = best
        policy = _thriftiest(instance, degree, m, J, policy, need)
        choice = Choice(counts, degree, m, J, policy, need, steps, step_s, least + scoring)
    instance.packs[key] = choice
    return choice


def _thriftiest(instance: Instance, degree: int, m: int, J: int, policy: str, need: Need) -> str:
    """Return the policy that recomputes least among those that cost no more than the one chosen and fit."""
    key = ("thrifty", degree, m, policy, need)
    if key not in instance.cache:
        cost = instance.step_cost(degree, policy, need)
        same = [p for p in instance.policies if instance.step_cost(degree, p, need) == cost]
        instance.cache[key] = [(p, instance.slot_limit(degree, m, p, need)) for p in same]
    return next(p for p, limit in instance.cache[key] if limit >= J)


def group_seconds(instance: Instance, packs: list[Choice]) -> float:
    """Return the time a group needs for packs one after another: load, compile each new program, run."""
    if not packs:
        return 0.0
    programs = len({pack.program for pack in packs})
    load = instance.load_seconds(packs[0].degree)
    return load + programs * instance.cost.compile_s + sum(pack.run_s for pack in packs)


def merge_counts(*parts: Counts) -> Counts:
    """Add up sets of jobs."""
    total: dict[int, int] = {}
    for part in parts:
        for k, n in part:
            total[k] = total.get(k, 0) + n
    return tuple(sorted([(k, n) for k, n in total.items() if n]))
