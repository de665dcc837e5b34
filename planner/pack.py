"""One pack: given its jobs and degree, choose m, J and recompute policy, and lay the jobs into slots."""

import heapq
from typing import NamedTuple

from planner.instance import Counts, Instance, Need


class Choice(NamedTuple):
    """Hold a pack as chosen: its jobs by class, program, micro-steps and seconds (compilation not included)."""

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


def divisors(n: int) -> list[int]:
    """Return the divisors of n, greatest first."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)}, reverse=True)


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
    if len(steps) > 10 or longest == floor:
        return longest, slots
    return _exact_layout(steps, order, J, floor, longest, slots)


def _exact_layout(
    steps: list[int], order: list[int], J: int, floor: int, best: int, best_slots: list[list[int]]
) -> tuple[int, list[list[int]]]:
    """Improve a layout of few jobs to the best one; slots of equal load are tried once."""
    loads = [0] * J
    slots: list[list[int]] = [[] for _ in range(J)]

    def place(position: int) -> None:
        nonlocal best, best_slots
        if position == len(order):
            best, best_slots = max(loads), [list(slot) for slot in slots]
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


def slot_counts(steps: dict[int, int], limit: int) -> list[int]:
    """Return the numbers of slots worth trying for jobs given as {micro-steps: how many}, at most `limit`.

    Equal jobs run in waves: the least J for each small number of waves (waves evened out). Unequal ones:
    about as many slots as the longest job's length leaves work for, since beyond it slots only idle.
    """
    N = sum(steps.values())
    top = min(N, limit)
    if len(steps) == 1:
        waves = -(-N // top)
        return sorted({-(-N // w) for w in range(waves, min(waves + 4, N + 1))})
    ideal = sum(s * n for s, n in steps.items()) / max(steps)
    near = {int(ideal) - 1, int(ideal), int(ideal) + 1, int(ideal) + 2, int(ideal * 1.25) + 1, top}
    return sorted({min(max(J, 1), top) for J in near})


def choose_pack(instance: Instance, counts: Counts, degree: int) -> Choice | None:
    """Choose m, J and policy for the least time of one pack; None where it fits in no way.

    Of equal times the fewest slots win, which leaves memory free. m runs over the divisors of every batch
    size.
    """
    key = ("pack", counts, degree)
    if key in instance.cache:
        return instance.cache[key]
    need = instance.need(counts)
    best: Choice | None = None
    scoring = sum(n * instance.eval_seconds(degree, k) for k, n in counts)
    for m in divisors(need.divisor):
        limits = {policy: instance.slot_limit(degree, m, policy, need) for policy in instance.policies}
        if not max(limits.values()):
            continue
        expanded = [instance.classes[k].micro_steps(m) for k, n in counts for _ in range(n)]
        tally: dict[int, int] = {}
        for s in expanded:
            tally[s] = tally.get(s, 0) + 1
        layouts: dict[int, int] = {}
        for policy, limit in limits.items():
            if not limit:
                continue
            cost = instance.step_cost(degree, policy, need)
            for J in slot_counts(tally, limit):
                step_s = cost.seconds(J, m, need.S, need.bucket)
                floor = max(max(tally), -(-sum(expanded) // J))
                if best is not None and floor * step_s + scoring >= best.run_s:
                    continue
                if J not in layouts:
                    if len(tally) == 1:
                        layouts[J] = -(-len(expanded) // J) * expanded[0]
                    else:
                        layouts[J] = lay_out(expanded, J)[0]
                steps = layouts[J]
                run_s = steps * step_s + scoring
                if best is None or run_s < best.run_s:
                    best = Choice(counts, degree, m, J, policy, need, steps, step_s, run_s)
    instance.cache[key] = best
    return best


def group_seconds(instance: Instance, packs: list[Choice]) -> float:
    """Return the time a device group needs for packs one after another: load, compile each new program, run."""
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
    return tuple(sorted((k, n) for k, n in total.items() if n))
