"""Our method: bounds, greedy cuts, lines from the configuration LP, re-cutting and local search; exact if
small.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from planner.bound import lower_bound
from planner.config_lp import degree_shares, lines, lp_bound, make_types, solve
from planner.exact import exact, is_small
from planner.greedy import Found, cut_line, greedy, patterns
from planner.groups import Solution, makespan
from planner.instance import Instance
from planner.recut import recut
from planner.search import improve

GOAL = 1.002  # makespan / bound at which searching more is idle
STARTS = 6  # solutions that local search starts from
RACES = 3  # rounds of local search
HEAT = 1e-4  # first temperature of the local search, as a share of the makespan, for one device


@dataclass(frozen=True)
class Effort:
    """Set how long the searches run; numbers of tries, never seconds, so that plans do not depend on the
    machine. `milp_nodes` above 0 also starts from the configuration MILP, cut at so many nodes.
    """

    recuts: int = 60
    proposals: int = 6_000
    milp_nodes: int = 0


def bounds(instance: Instance) -> tuple[float, str]:
    """Return the lower bound of the makespan and its kind: longest, lp or pigeonhole."""
    bound, kind = lower_bound(instance)
    lp = lp_bound(instance, make_types(instance), bound)
    return (lp, "lp") if lp > bound else (bound, kind)


def ours(
    instance: Instance,
    bound: float,
    effort: Effort,
    start: Solution | None = None,
    deadline: float = float("inf"),
) -> tuple[Solution, str, bool]:
    """Return our best solution, the step that found it, and whether the deadline (perf_counter) cut the
    search.

    `start` takes part where given.
    """
    goal = bound * GOAL
    if is_small(instance):
        return exact(instance), "exact", False
    found = greedy(instance, goal)
    best, name = min(found.values(), key=makespan), "greedy"
    if start is not None and makespan(start) <= makespan(best):
        best, name = start, "incumbent"

    def keep(other: Solution, by: str) -> None:
        nonlocal best, name
        if makespan(other) < makespan(best) * (1 - 1e-9):
            best, name = other, by

    if makespan(best) <= goal:
        return best, name, False
    starts = [best, *found.values(), *_lp_cuts(instance, bound, goal, effort.milp_nodes)]
    starts = sorted({makespan(s): s for s in starts}.values(), key=makespan)[:STARTS]
    keep(starts[0], "greedy on the configuration LP")
    heat = HEAT / instance.devices.count
    for race in range(
        RACES
    ):  # each race has half the starters of the one before, and as many proposals in all
        for n, first in enumerate(starts):
            if makespan(best) <= goal:
                return best, name, False
            if time.perf_counter() > deadline:
                return best, name, True
            cut = recut(instance, first, effort.recuts // len(starts), seed=10 * race + n, goal=goal)
            keep(cut, "re-cut")
            tries = effort.proposals // RACES // len(starts)
            starts[n] = improve(instance, cut, tries, 10 * race + n, heat, goal)
            keep(starts[n], "local search")
        starts = sorted(starts, key=makespan)[: -(-len(starts) // 2)]
    return best, name, False


def _lp_cuts(instance: Instance, bound: float, goal: float, nodes: int) -> Iterator[Solution]:
    """Yield cuts of the lines in which the configuration LP would run the jobs, in its shares of degrees too."""
    types = make_types(instance)
    for whole in (0, nodes) if nodes else (0,):
        answer = solve(instance, types, bound * 1.02, whole)
        if not len(answer.jobs):
            continue
        tried = patterns(instance, degree_shares(instance, types, answer))
        for line in lines(instance, types, answer):
            found: Found = {}
            cut_line(instance, line, found, goal, tried)
            yield from found.values()
