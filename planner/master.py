"""The groups that searches met, and an integer program that chooses among them (a restricted master heuristic).

For a time C, columns are the groups met that end within C, and  min Σ d x,  Σ jobs · x ≥ n,  x whole, asks for the
fewest devices that hold all jobs. Where these are G or fewer there is a plan within C: jobs that are held twice are
left out of one group. The least C of the linear relaxation is found first; near it few columns matter, for one whose
reduced cost is above G − (value of the relaxation) is in no solution on G devices.
"""

import numpy as np

from planner.fill import Filler, Tables
from planner.groups import Group, Solution, make_group, makespan
from planner.instance import Instance

PRECISE = 1e-3  # relative width at which the search for the least time stops
NODES = 300  # of the branch and bound, a time
AIMS = (0.5, 0.7, 0.9)  # times that groups are sought for, between the bound and the best known
ROUNDS = 5  # of a time
WIDE = 8  # beam and branches of the search for such groups
MOST = 1_500  # columns of one integer program; those of least reduced cost are kept


class Master:
    """Hold the groups met as columns, fastest first, and choose among them."""

    def __init__(self, instance: Instance) -> None:
        assert instance.met is not None
        self.instance, self.groups = instance, sorted(instance.met.values(), key=lambda g: g.seconds)
        self.n = np.array([n for _, n in instance.counts])
        self.seconds = np.array([group.seconds for group in self.groups])
        self.degree = np.array([float(group.degree) for group in self.groups])
        self.jobs = np.zeros((len(self.n), len(self.groups)))
        for column, group in enumerate(self.groups):
            for pack in group.packs:
                for k, n in pack.counts:
                    self.jobs[k, column] += n

    def relaxed(self, C: float) -> tuple[float, np.ndarray]:
        """Return the least devices of the relaxation within C (∞: none), and what a job of each class is worth."""
        from scipy.optimize import linprog

        end = int(np.searchsorted(self.seconds, C, side="right"))
        jobs = self.jobs[:, :end]
        if not (jobs.any(axis=1)).all():
            return np.inf, np.zeros(0)
        found = linprog(self.degree[:end], A_ub=-jobs, b_ub=-self.n, method="highs")
        return (found.fun, -found.ineqlin.marginals) if found.x is not None else (np.inf, np.zeros(0))

    def whole(self, C: float) -> Solution | None:
        """Return groups met that hold all jobs within C; None where none were found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        G = self.instance.usable
        value, worth = self.relaxed(C)
        if value > G * (1 + 1e-9):
            return None
        end = int(np.searchsorted(self.seconds, C, side="right"))
        reduced = self.degree[:end] - worth @ self.jobs[:, :end]
        kept = np.flatnonzero(reduced <= G - value + 1e-6)
        if len(kept) > MOST:
            kept = np.sort(kept[np.argsort(reduced[kept], kind="stable")[:MOST]])
        found = milp(
            self.degree[kept],
            constraints=LinearConstraint(self.jobs[:, kept], self.n, np.inf),
            integrality=np.ones(len(kept)),
            bounds=Bounds(0, G),
            options={"node_limit": NODES},
        )
        if found.x is None or round(found.fun) > G:
            return None
        return self._without_twice([(self.groups[c], round(x)) for c, x in zip(kept, found.x, strict=True)])

    def _without_twice(self, chosen: list[tuple[Group, int]]) -> Solution | None:
        """Return groups, each so many times, without the jobs that they hold beyond those there are."""
        left, out = self.n.copy(), []
        for group, times in chosen:
            for _ in range(times):
                parts = []
                for pack in group.packs:
                    taken = [(k, min(n, int(left[k]))) for k, n in pack.counts]
                    for k, n in taken:
                        left[k] -= n
                    parts.append(tuple((k, n) for k, n in taken if n))
                same = tuple(parts) == tuple(pack.counts for pack in group.packs)
                made = group if same else make_group(self.instance, group.degree, parts)
                if made is None:
                    return None
                out += [made] if made.packs else []
        return out

    def choose(self, best: Solution, low: float) -> Solution:
        """Return the best solution of groups met, or `best`; `low` is a lower bound on the makespan."""
        G, high = self.instance.usable, makespan(best)
        least = high
        while least - low > PRECISE * low:
            middle = (low + least) / 2
            low, least = (low, middle) if self.relaxed(middle)[0] <= G * (1 + 1e-9) else (middle, least)
        C = least + PRECISE * low
        while makespan(best) * (1 - PRECISE / 4) > C:
            found = self.whole(C)
            if found is not None and makespan(found) < makespan(best):
                best = found
            else:
                least = C
            if makespan(best) - least <= PRECISE * low:
                break
            C = (least + makespan(best)) / 2
        return best


def choose(instance: Instance, tables: Tables, best: Solution, low: float) -> Solution:
    """Return the best solution of groups met, or `best`, once those that earn most at the relaxation's prices are
    among them; `low` is a lower bound on the makespan.
    """
    assert instance.met is not None
    jobs = np.array([n for _, n in instance.counts])
    for aim in AIMS:
        C = low + aim * (makespan(best) - low)
        for _ in range(ROUNDS):
            known, (value, worth) = len(instance.met), Master(instance).relaxed(C)
            if np.isfinite(value):
                for table in tables.values():
                    Filler(instance, table, worth * C, jobs, C, WIDE, WIDE).fill()
            if len(instance.met) == known:
                break
    return Master(instance).choose(best, low)
