"""Our method: bounds, greedy cuts, groups filled by a linear program's prices, local search; exact if small."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.bound import lower_bound
from planner.config_lp import ConfigurationLP, make_types
from planner.errors import PlanError
from planner.exact import exact, is_small
from planner.fill import Prices, dive, make_tables
from planner.greedy import greedy
from planner.group_lp import group_bound
from planner.groups import Solution, makespan, remember
from planner.instance import Instance
from planner.master import choose
from planner.recut import recut
from planner.search import improve

GROUP_JOBS = 1_000  # the most for which the bound over whole groups is sought
GOAL = 1.002  # makespan / bound at which searching more is idle
AIMS = (0.6, 0.8, 0.4)  # times that all groups are filled for, between the bound and the best known
NOISE = 0.02  # deviation of the logarithms of prices, where they are disturbed
STARTS = 3  # solutions that local search starts from
FEW = 5  # jobs a device, below which an integer program chooses among the groups that searches met
ROUNDS, ROUNDS_OF_FEW = 24, 40  # of the bound over whole groups, which mostly counts where jobs are few
FEW_CLASSES = 40  # classes of jobs, above which that program takes too long
LEAST_RENT = 0.05  # a device of groups that are not needed is taken to cost
HEAT = 1e-4  # first temperature of the local search, as a share of the makespan, for one device


@dataclass(frozen=True)
class Effort:
    """Set how long the searches run; numbers of tries, never seconds, so that plans do not depend on the
    machine.

    Raises:
        PlanError: no order of the jobs, or no race.
    """

    recuts: int = 60
    proposals: int = 2_000
    dives: int = 6
    restarts: int = 1
    orders: int = 5  # of the jobs, which greedy cuts
    races: int = 3  # rounds of local search; half the starts are dropped after each

    def __post_init__(self) -> None:
        if self.orders < 1 or self.races < 1:
            raise PlanError(
                f"effort has {self.orders} orders and {self.races} races; each must be at least 1"
            )


class Bound(NamedTuple):
    """Hold a lower bound on the makespan in seconds, its kind (longest, lp, pigeonhole or groups), and at it, in
    seconds × devices, what a job of each class is worth, and a second of a group of each degree costs: searches go by
    these, and prices prove a bound of the kind `groups`, where a device is worth the same in all groups.
    """

    seconds: float
    kind: str
    prices: np.ndarray
    rents: dict[int, float]

    def worth(self, noise: np.ndarray | float = 1.0) -> Prices:
        """Return the prices for groups of each degree d, if d is what a second of them costs; disturbed by `noise`."""
        return {d: self.prices * noise / max(rent / d, LEAST_RENT) for d, rent in self.rents.items()}


def bounds(instance: Instance) -> Bound:
    """Return the best lower bound of all kinds; before the first device is free, nothing is done."""
    first = min(instance.busy, default=0.0)
    seconds, kind = lower_bound([instance])
    seconds += first
    types = make_types(instance)
    lp = ConfigurationLP(instance, types)
    if (found := lp.bound(seconds)) > seconds:
        seconds, kind = found, "lp"
    _, _, _, prices, rents = lp.solve(seconds * 1.02)
    if instance.n_jobs <= GROUP_JOBS:
        rounds = ROUNDS_OF_FEW if instance.n_jobs < FEW * instance.usable else ROUNDS
        found, better = group_bound(instance, types, seconds - first, prices, rounds)
        if found + first > seconds:
            return Bound(found + first, "groups", better, {d: float(d) for d in rents})
    return Bound(seconds, kind, prices, rents)


def ours(
    instance: Instance,
    bound: Bound,
    effort: Effort,
    start: Solution | None = None,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Solution, str, bool]:
    """Return our best solution, the step that found it, and whether the deadline by some clock cut the search.

    `start` takes part where given.
    """
    goal = bound.seconds * GOAL
    if is_small(instance):
        return exact(instance), "exact", False
    best, name = min(greedy(instance, goal, effort.orders).values(), key=makespan), "greedy"
    if start is not None and makespan(start) <= makespan(best):
        best, name = start, "incumbent"

    def keep(other: Solution | None, by: str) -> None:
        nonlocal best, name
        if other is not None and makespan(other) < makespan(best) * (1 - 1e-9):
            best, name = other, by

    if makespan(best) <= goal:
        return best, name, False
    few = instance.n_jobs < FEW * instance.usable and not instance.busy
    if few and len(instance.classes) <= FEW_CLASSES:
        instance.met = {}
        for group in best:
            remember(instance, group)
    types = make_types(instance)
    tables = make_tables(instance, types, makespan(best))
    first = best
    heat = HEAT / instance.devices.count
    for restart in range(effort.restarts):
        rng = np.random.default_rng(restart)
        starts, lost = [first], dict[int, float]()
        for n in range(effort.dives):
            C = bound.seconds + AIMS[n % len(AIMS)] * (makespan(best) - bound.seconds)
            noise = NOISE if n >= len(AIMS) else 0.0
            worth = bound.worth(np.exp(rng.normal(0.0, noise, len(bound.prices))))
            dived = dive(instance, tables, worth, C, lost)
            starts += [dived] if dived else []
            keep(dived, "dive")
        starts = sorted({makespan(s): s for s in starts}.values(), key=makespan)[:STARTS]
        for race in range(effort.races):
            for n, start in enumerate(starts):
                if makespan(best) <= goal:
                    return best, name, False
                if clock() > deadline:
                    return best, name, True
                seed = 100 * restart + 10 * race + n
                tries = effort.recuts // effort.races // len(starts)
                cut = recut(instance, tables, bound.worth(), start, tries, seed, goal)
                keep(cut, "re-cut")
                tries = effort.proposals // effort.races // len(starts)
                starts[n] = improve(instance, cut, tries, seed, heat, goal)
                keep(starts[n], "local search")
            starts = sorted(starts, key=makespan)[: -(-len(starts) // 2)]
            if instance.met is not None and race:
                starts[-1] = choose(instance, tables, best, bound.seconds)
                keep(starts[-1], "master")
    return best, name, False
