"""The linear program over whole groups: what a job is worth if groups cannot be filled to the brim, and a bound.

Give every class of jobs a price π_k. Some group of d devices earns its share d · Σ n π / G of all prices, or more. So
no plan is shorter than the least time, over the degrees, in which a group can earn its share, whatever the prices.
A group's packs are a knapsack over time. A pack of J slots and L micro-steps is worth at most what the jobs dearest a
micro-step are that J · L micro-steps hold, the last job cut; and to score jobs worth v takes at least
v · min_k (scoring_k / π_k). Two packs of a group may take the same jobs here, and every time is cut down to a whole
cell: both only lower the bound.

Good prices are the duals of  min Σ d x,  Σ_columns jobs · x ≥ n.  A column is a group that ends within C, the best
bound so far; columns are those that earn most at the prices so far, until G devices suffice for C.
"""

from functools import cached_property

import numpy as np

from planner.config_lp import Types, quiet_highs
from planner.instance import Instance
from planner.trials import Best, Ranking, Table, TooManyError, make_table

CELLS = 2_000  # of time, up to TOP
TOP = 1.25  # how far above the bound known before the search goes
MOST_TRIALS = 8_000  # packs of one degree; above, groups hold many and the other bounds are near
COLUMNS = 16  # a round and degree
TRUST = 3.0  # a job is worth at most so many times its price in the configuration LP
NEW = 0.7  # share of the newest duals in the next prices


class Groups:
    """Look for the groups of one degree that earn most."""

    def __init__(self, instance: Instance, types: Types, degree: int, top: float) -> None:
        self.instance, self.types, self.degree = instance, types, degree
        self.jobs = np.array([n for _, n in instance.counts])
        self.load = instance.load_seconds(degree)
        self.cell = (top - self.load) / CELLS
        self.scoring = np.array([instance.eval_seconds(degree, k) for k in range(len(self.jobs))])
        at = np.flatnonzero(types.degree[types.t] == degree)
        t = types.t[at]
        self.least = np.full(
            len(self.jobs), np.inf
        )  # seconds of a job that shares its steps with as many as may be
        np.minimum.at(
            self.least, types.k[at], types.steps[at] * (types.t0[t] / types.limit[t] + types.slot_s[t])
        )

    @cached_property
    def table(self) -> Table | None:
        """List the packs; None where they are too many, or some as short as a cell."""
        try:
            table = make_table(self.instance, self.types, self.degree, self.cell * CELLS, MOST_TRIALS)
        except TooManyError:
            return None
        return table if len(table.seconds) and table.seconds.min() >= self.cell else None

    def offer(self, prices: np.ndarray, share: float, least: float) -> float:
        """Take prices, and the part of them all that is each device's share; return the seconds that earning it would
        take if a group did its best job, or where that is below `least` its best pack, over and over; ∞ where none of
        them has a price.
        """
        self.goal = self.degree * share
        self.fixed = self.load + self.goal * float((self.scoring / np.maximum(prices, 1e-12)).min())
        seconds = self._seconds(prices / self.least)
        if seconds >= least or self.table is None:
            return seconds
        table = self.table
        only = np.zeros_like(table.row)
        self.best = Ranking(table.steps, prices).best(
            self.jobs[None], only, table.row, table.capacity, cut=True
        )
        return self._seconds(self.best.worth / table.seconds)

    def _seconds(self, rates: np.ndarray) -> float:
        best = float(rates.max())
        return self.fixed + self.goal / best if best else np.inf

    def look(self, C: float) -> tuple[float, list[np.ndarray]] | None:
        """Return the least seconds that the share takes, and groups that earn most within C: jobs of each class; None
        where the packs are too many.
        """
        if self.table is None:
            return None
        best, cells = self.best, (self.table.seconds / self.cell).astype(int)
        packs = _useful(cells, best.worth)
        earned, needed = _knapsack(cells[packs], best.worth[packs])
        packs = packs[needed]
        at = int(np.searchsorted(earned, self.goal * (1 - 1e-9)))
        end = min(int((C - self.fixed) / self.cell + 1e-6), CELLS)
        found = _columns(best, cells, packs, earned[: end + 1]) if end > 0 else []
        return self.fixed + at * self.cell, found


def _columns(best: Best, cells: np.ndarray, packs: np.ndarray, earned: np.ndarray) -> list[np.ndarray]:
    """Return groups by their jobs: each of the best packs to begin with, one a row, filled up best."""
    cells, worth = cells[packs], best.worth[packs]
    fit = np.flatnonzero(cells < len(earned))
    total = worth[fit] + earned[len(earned) - 1 - cells[fit]]
    out: list[np.ndarray] = []
    rows: set[int] = set()
    for first in fit[np.argsort(-total, kind="stable")]:
        row = int(best.line[packs[first]])
        if row in rows:
            continue
        rows.add(row)
        jobs = best.taken(int(packs[first]))
        left = len(earned) - 1 - int(cells[first])
        while earned[left] > 0:
            left = int(np.searchsorted(earned, earned[left]))  # the first cell at which so much is earned
            inside = np.flatnonzero(cells <= left)
            pack = inside[(earned[left] - worth[inside] - earned[left - cells[inside]]).argmin()]
            jobs = jobs + best.taken(int(packs[pack]))
            left -= int(cells[pack])
        out.append(jobs)
        if len(out) == COLUMNS:
            break
    return out


def _useful(cells: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Return the packs that earn more than any as short or shorter, in order of their cells."""
    order = np.lexsort((-worth, cells))
    top = np.maximum.accumulate(worth[order])
    return order[np.concatenate([worth[order][:1] > 0, top[1:] > top[:-1]])]


def _knapsack(cells: np.ndarray, worth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most that packs, each any number of times, earn within 0, 1, … CELLS cells, and which of them that
    takes: others earn no more than shorter ones together.
    """
    earned = np.zeros(CELLS + 1)
    needed = []
    for pack, (c, w) in enumerate(zip(cells.tolist(), worth.tolist(), strict=True)):
        if earned[c] >= w:
            continue
        needed.append(pack)
        while c <= CELLS:  # the pack up to once more, up to three times more, up to seven, …
            np.maximum(earned[c:], earned[:-c] + w, out=earned[c:])
            c, w = 2 * c, 2 * w
    return earned, np.array(needed)


class Master:
    """Hold the linear program over the groups found, which goes on from its last basis; jobs of each class may also be
    left out, at a penalty.
    """

    def __init__(self, counts: np.ndarray, penalty: np.ndarray) -> None:
        self.highs, self.columns = quiet_highs(), len(counts)
        for k, n in enumerate(counts):
            self.highs.addRow(n, np.inf, 0, [], [])
            self.highs.addCol(penalty[k], 0.0, np.inf, 1, [k], [1.0])

    def add(self, degree: int, groups: list[np.ndarray]) -> None:
        """Add groups of a degree by their jobs of each class."""
        self.columns += len(groups)
        for jobs in groups:
            used = jobs.nonzero()[0]
            self.highs.addCol(degree, 0.0, np.inf, len(used), used, jobs[used])

    def solve(self) -> tuple[float, np.ndarray]:
        """Return the fewest devices, and the duals of the classes."""
        self.highs.run()
        return self.highs.getInfo().objective_function_value, np.array(self.highs.getSolution().row_dual)


def group_bound(
    instance: Instance, types: Types, low: float, prices: np.ndarray, rounds: int
) -> tuple[float, np.ndarray]:
    """Return a bound, which may be below the known one `low`, and its prices in seconds × devices; `prices` are the
    configuration LP's.
    """
    groups = [Groups(instance, types, d, TOP * low) for d in instance.degrees]
    n, G = np.array([n for _, n in instance.counts], dtype=float), instance.usable
    now = prices * G / (n @ prices)  # so that a device earns 1
    master = Master(n, TRUST * now)
    bound, good = 0.0, now
    for _ in range(rounds):
        share, least, known = float(n @ now) / G, TOP * low, master.columns  # longer packs are in no table
        for group in list(groups):
            seconds = group.offer(now, share, least)
            if seconds >= least:
                continue
            found = group.look(max(bound, low))
            if found is not None:
                seconds, jobs = found
                master.add(group.degree, jobs)
            if seconds < least:
                least = seconds
                groups.remove(group)
                groups.insert(0, group)  # the next round begins with it
            if least <= bound:  # no more can be claimed
                break
        if least > bound:
            bound, good = least, now
        if master.columns == known:
            break
        devices, duals = master.solve()
        if devices <= G * (1 + 1e-6):
            break
        now = (1 - NEW) * now / share + NEW * duals
    load = min(group.load for group in groups)
    return bound * (1 - 1e-9), good * G * (max(bound, low) - load) / (n @ good)
