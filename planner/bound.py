"""Lower bounds on the makespan of any plan that keeps its device groups: longest job, configuration LP,
pigeonhole.

All three are tests "could everything finish within C?", monotone in C, solved by bisection. A mode is (degree
d, policy, m, J). A job of class k in a mode holds a slot for s_k = ⌈rows / m⌉ steps of

    T ≥ t0 + J · (c·m·S_k + a·R_k)

since a pack's length and rank bucket are at least its jobs' own, and takes at least d · s_k · T / J of
machine time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from planner.instance import Instance
from planner.signature import divisors

TOLERANCE = 1e-9
LEAST = 1e-30  # seconds of a slot to divide by: a fitted model may charge nothing for one


class Modes(NamedTuple):
    """Hold one row a (class, degree, policy, m): slot time T = t0 + J · token, limits and counts."""

    k: np.ndarray
    degree: np.ndarray
    t0: np.ndarray
    token: np.ndarray
    steps: np.ndarray
    scoring: np.ndarray
    limit: np.ndarray  # the most slots that memory allows
    setup: np.ndarray


def modes(instance: Instance) -> Modes:
    """List every class's modes."""
    rows = []
    for k, job in enumerate(instance.classes):
        need = instance.need(((k, 1),))
        for d in instance.degrees:
            setup = instance.load_seconds(d) + instance.cost.compile_s
            for policy in instance.policies:
                cost = instance.step_cost(d, policy, need)
                for m in divisors(need.divisor):
                    limit = instance.slot_limit(d, m, policy, need)
                    if limit:
                        token = cost.c * m * need.S + (cost.a0 + cost.a1 * m * need.S) * need.bucket
                        scoring = instance.eval_seconds(d, k)
                        rows.append((k, d, cost.t0, token, job.micro_steps(m), scoring, limit, setup))
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
    return Modes(columns[0].astype(int), *columns[1:])


def longest(instance: Instance, table: Modes) -> np.ndarray:
    """Return the time of a job of each class alone, in its best mode; ∞ where it has none."""
    alone = table.setup + table.steps * (table.t0 + table.token) + table.scoring
    best = np.full(len(instance.classes), np.inf)
    np.minimum.at(best, table.k, alone)
    return best


def group_work(instance: Instance, table: Modes, C: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's least group time a job within C (∞ where impossible), and its share of slots.

    A job that must end within C allows at most J = ⌊((C − setup − scoring) / steps − t0) / token⌋ slots
    beside it.
    """
    room = (C - table.setup - table.scoring) / table.steps - table.t0
    J = np.minimum(np.floor(room / np.maximum(table.token, LEAST) * (1 + TOLERANCE)), table.limit)
    ok = J >= 1
    time = np.where(ok, table.steps * (table.t0 / np.maximum(J, 1) + table.token) + table.scoring, np.inf)
    return time, J, ok


def work_fits(instance: Instance, table: Modes, counts: np.ndarray, C: float) -> bool:
    """Say whether machine time suffices: Σ_k n_k · min over modes ≤ G · (C − setup), the LP's value in closed
    form.

    With every job fractional over its modes, the LP puts each job wholly in its cheapest admissible mode; a
    mode that cannot finish one job within C is not admissible (a job runs in one mode).
    """
    time, _, _ = group_work(instance, table, C)
    best = np.full(len(counts), np.inf)
    np.minimum.at(best, table.k, time * table.degree)
    setup = float(table.setup.min())
    return float(best @ counts) <= instance.usable * (C - setup) * (1 + TOLERANCE)


def shared_work_fits(
    instances: Sequence[Instance], tables: Sequence[Modes], counts: np.ndarray, C: float
) -> bool:
    """Say whether the machine time of devices of several types suffices: Σ_k n_kτ · w_kτ ≤ G_τ · (C − setup_τ) for some
    shares n_kτ of the jobs, w_kτ being the least machine time of a job of class k at type τ.
    """
    from scipy.optimize import linprog

    K, T = len(counts), len(instances)
    best = np.full((T, K), np.inf)
    for own, table, instance in zip(best, tables, instances, strict=True):
        time, _, _ = group_work(instance, table, C)
        np.minimum.at(own, table.k, time * table.degree)
    if not np.isfinite(best).any(axis=0).all():
        return False
    there = [
        instance.usable * max(C - float(table.setup.min()), 0.0)
        for instance, table in zip(instances, tables, strict=True)
    ]
    ways = np.isfinite(best).ravel()  # the least u with Σ_k w_kτ n_kτ ≤ u · there_τ
    work = np.kron(np.eye(T), np.ones(K)) * np.where(ways, best.ravel(), 0.0)
    found = linprog(
        np.append(np.zeros(ways.sum()), 1.0),
        A_ub=np.column_stack([work[:, ways], -np.array(there)]),
        b_ub=np.zeros(T),
        A_eq=np.column_stack([np.tile(np.eye(K), T)[:, ways], np.zeros(K)]),
        b_eq=counts,
        method="highs",
    )
    return bool(found.x is not None and found.fun <= 1 + TOLERANCE)


def least_work(instance: Instance, table: Modes, C: float) -> dict[int, np.ndarray]:
    """Return the least group time of a job of each class within C on a group of each degree; ∞ where it has none."""
    time, _, _ = group_work(instance, table, C)
    out = {}
    for d in instance.degrees:
        out[d] = np.full(len(instance.classes), np.inf)
        at = table.degree == d
        np.minimum.at(out[d], table.k[at], time[at])
    return out


def most_jobs(instance: Instance, work: dict[int, np.ndarray], order: np.ndarray, C: float) -> np.ndarray:
    """Return, for each prefix of the classes in an order, the most jobs of it that the devices complete within C.

    A group of degree d completes at most ⌊(C − setup_d) / u_d⌋ jobs of a set whose lightest needs u_d; the devices
    split into groups of any degrees so as to complete the most.
    """
    capacity = {}
    for d, own in work.items():
        setup = instance.load_seconds(d) + instance.cost.compile_s
        lightest = np.minimum.accumulate(own[order])
        capacity[d] = np.floor(np.maximum(C - setup, 0.0) / lightest * (1 + TOLERANCE))
    most = np.zeros(len(order))
    left = np.full(len(order), float(instance.usable))
    # devices in groups of powers of two: try each degree as the largest used, fill the rest with the best
    # below it
    best_each: dict[int, np.ndarray] = {}
    for d in sorted(capacity):
        halves = best_each[d // 2] * 2 if d // 2 in best_each else np.zeros(len(order))
        best_each[d] = np.maximum(capacity[d], halves)
    for d in sorted(best_each, reverse=True):
        whole = np.floor(left / d)
        most += whole * best_each[d]
        left -= whole * d
    return most


def pigeonhole_fits(
    instances: Sequence[Instance], tables: Sequence[Modes], counts: np.ndarray, C: float
) -> bool:
    """Say whether the numbers of jobs fit: for each prefix of the heaviest classes, groups hold whole jobs only."""
    works = [least_work(instance, table, C) for instance, table in zip(instances, tables, strict=True)]
    weight = np.minimum.reduce([own * d for work in works for d, own in work.items()])
    if not np.isfinite(weight).all():
        return False
    order = np.argsort(-weight, kind="stable")
    most = sum(most_jobs(instance, work, order, C) for instance, work in zip(instances, works, strict=True))
    return bool((np.cumsum(counts[order]) <= most).all())


def lower_bound(instances: Sequence[Instance]) -> tuple[float, str]:
    """Return the largest of the three bounds in seconds, and its name: longest, lp or pigeonhole.

    Several instances are the same jobs on devices of as many types, which share them.
    """
    tables = [modes(instance) for instance in instances]
    counts = np.array([n for _, n in instances[0].counts], dtype=float)
    alone = [longest(instance, table) for instance, table in zip(instances, tables, strict=True)]
    bounds = {"longest": float(np.minimum.reduce(alone).max())}
    tests: dict[str, Callable[[float], bool]] = {
        "lp": lambda C: (
            work_fits(instances[0], tables[0], counts, C)
            if len(instances) == 1
            else shared_work_fits(instances, tables, counts, C)
        ),
        "pigeonhole": lambda C: pigeonhole_fits(instances, tables, counts, C),
    }
    for name, test in tests.items():
        low = max(bounds.values())
        if test(low):
            continue
        high = 2 * low
        while not test(high):
            low, high = high, 2 * high
        while high - low > 1e-6 * low:
            middle = (low + high) / 2
            low, high = (low, middle) if test(middle) else (middle, high)
        bounds[name] = low
    kind = max(bounds, key=lambda name: bounds[name])
    return bounds[kind], kind
