"""Our method: bounds, greedy cuts, lines from the configuration LP, re-cutting and local search; exact if
small.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.bound import lower_bound
from planner.config_lp import degree_shares, lines, lp_bound, make_types, solve
from planner.exact import exact, is_small
from planner.greedy import best_cut, greedy, patterns
from planner.groups import Solution, makespan
from planner.instance import Instance
from planner.recut import recut
from planner.search import improve

GOAL = 1.002  # makespan / bound at which searching more is idle


@dataclass(frozen=True)
class Effort:
    """Set how long the searches run; numbers of tries, never seconds, so that plans do not depend on the
    machine.
    """

    recuts: int = 60
    proposals: int = 6_000
    cycles: int = 1


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
    best, name = greedy(instance, goal), "greedy"
    if start is not None and makespan(start) <= makespan(best):
        best, name = start, "incumbent"

    def keep(found: Solution, by: str) -> None:
        nonlocal best, name
        if makespan(found) < makespan(best) * (1 - 1e-9):
            best, name = found, by

    for by, step in _steps(instance, bound, goal, effort):
        if makespan(best) <= goal:
            break
        if time.perf_counter() > deadline:
            return best, name, True
        keep(step(best), by)
    return best, name, False


def _steps(
    instance: Instance, bound: float, goal: float, effort: Effort
) -> Iterator[tuple[str, Callable[[Solution], Solution]]]:
    """Yield the searches that follow the greedy, each from the best solution to one no slower."""
    yield "greedy on the configuration LP", lambda best: _lp_cuts(instance, best, bound, goal)
    for cycle in range(effort.cycles):
        seed = 2 * cycle
        if effort.recuts:
            yield "re-cut", lambda best, seed=seed: recut(instance, best, effort.recuts, seed, goal)  # type: ignore[misc]
        for heat in (1e-4, 4e-4) if effort.proposals else ():
            yield (
                "local search",
                lambda best, seed=seed, heat=heat: improve(  # type: ignore[misc]
                    instance, best, effort.proposals, seed + 1, heat / instance.devices.count, goal
                ),
            )


def _lp_cuts(instance: Instance, best: Solution, bound: float, goal: float) -> Solution:
    """Return the best of a solution and cuts of the lines in which the LP would run the jobs."""
    types = make_types(instance)
    answer = solve(instance, types, bound * 1.02)
    if len(answer.jobs):
        tried = patterns(instance, degree_shares(instance, types, answer))
        for line in lines(instance, types, answer):
            best = best_cut(instance, line, best, goal, tried) or best
    return best
