"""The configuration LP: which programs to run, how much of each, and which jobs in them, if all could be cut
freely.

A type τ is (length, rank bucket, m, whether gradients are summed over micro-steps, degree d, policy). Per type:
z_τ programs (each compiled, none longer than C), X_τ micro-steps over all of them; y_kτ jobs of class k run in
it. The least machine time within C is

    V(C) = min Σ_τ d_τ (compile · z_τ + t0_τ · X_τ) + Σ_kτ d_τ · (s_kτ · slot_τ + scoring_kτ) · y_kτ
    Σ_τ y_kτ = n_k                                        every job runs
    t0_τ X_τ + Σ_k (s_kτ slot_τ + scoring) y_kτ ≤ z_τ (C − setup_τ)    a program ends within C
    Σ_k s_kτ y_kτ / J_kτ ≤ X_τ       J_kτ: the most slots beside job k, by memory and by ending within C
    s_kτ y_kτ / n_k ≤ X_τ,  y_kτ / n_k ≤ z_τ              a program that holds a class lasts as long as it

and no plan within C exists unless V(C) ≤ G · (C − load). V falls with C, so the least such C is a lower
bound. Groups are whole: those of D devices or more, all multiples of D, never have more than G_D = D · ⌊G / D⌋
devices, so their part of the machine time must be at most G_D · (C − load), too. V(C) is then the largest of all
parts, each times G / G_D.

The duals of the first rows are the jobs' values, which other searches go by; those of the parts say what a second of a
group costs.
"""

from collections.abc import Sequence
from itertools import count, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from planner.bound import LEAST
from planner.errors import PlanError
from planner.instance import Instance, Need
from planner.signature import divisors
from planner.specs import MOMENT_BYTES

if TYPE_CHECKING:
    from highspy import Highs
    from scipy.sparse import coo_matrix, csc_matrix

PRECISE = 5e-4  # relative width at which the search for the bound stops
SLACK = 1e-6  # the solver's tolerance, taken off the bound


class Types(NamedTuple):
    """Hold one row a type, and one row a (class, type) pair that may be."""

    needs: list[tuple[Need, int, int]]  # program need, m, degree
    degree: np.ndarray
    t0: np.ndarray
    slot_s: np.ndarray
    limit: np.ndarray
    setup: np.ndarray
    k: np.ndarray  # of pairs: class, type, micro-steps, scoring seconds
    t: np.ndarray
    steps: np.ndarray
    scoring: np.ndarray


def make_types(instance: Instance) -> Types:
    """List every type that some class needs, and every class it can serve."""
    if "types" in instance.cache:
        return instance.cache["types"]
    K = range(len(instance.classes))
    own = [instance.need(((k, 1),)) for k in K]
    seen = {(need.S, need.S_max) for need in own}  # a pack's mean length and longest may be two jobs'
    lengths = sorted({(max(a[0], b[0]), max(a[1], b[1])) for a in seen for b in seen})
    buckets = sorted({need.bucket for need in own})
    rows: list[tuple[Need, int, int, float, float, int, float]] = []
    pairs: list[tuple[int, int, int, float]] = []
    for S, S_max in lengths:
        inside = [k for k in K if own[k].S <= S and own[k].S_max <= S_max]
        for bucket in buckets:
            served = [k for k in inside if own[k].bucket <= bucket]
            if not any(own[k].S == S for k in served) or not any(own[k].bucket == bucket for k in served):
                continue
            targets = _least_targets(instance, served)
            for m in sorted({m for k in served for m in divisors(own[k].divisor)}):
                members = [k for k in served if own[k].divisor % m == 0]
                whole = [k for k in members if own[k].whole == m]
                optimizers = _least_optimizer(instance, members)
                summed = Need(m, bucket, S_max, S, optimizers, targets, 0)
                kinds = [(summed, members)] if len(whole) < len(members) else []
                kinds += [(summed._replace(whole=m), whole)] if whole else []
                for (need, takes), d in product(kinds, instance.degrees):
                    jobs = sum(instance.counts[k][1] for k in takes)
                    for t0, slot_s, limit, policy in dict(instance.programs(d, need)).get(m, []):
                        most = instance.slot_limit(d, m, policy, summed) if len(kinds) == 2 else 0
                        if need.whole and most >= min(
                            limit, jobs
                        ):  # summed ones may have all the slots of use
                            continue
                        setup = instance.load_seconds(d) + instance.cost.compile_s
                        pairs += [
                            (k, len(rows), instance.steps(m)[k], instance.eval_seconds(d, k)) for k in takes
                        ]
                        rows.append((need, m, d, t0, slot_s, limit, setup))
    numbers = np.array([row[2:] for row in rows], dtype=float).T  # degree, t0, seconds a slot, limit, set-up
    k, t, steps, scoring = np.array(pairs, dtype=float).T
    degree, t0, slot_s, limit, setup = numbers
    needs = [row[:3] for row in rows]
    types = Types(needs, degree, t0, slot_s, limit, setup, k.astype(int), t.astype(int), steps, scoring)
    instance.cache["types"] = types
    return types


def _least_targets(instance: Instance, served: list[int]) -> frozenset[str] | None:
    """Return the smallest target set of the classes, which costs a program no more than any union of them."""
    sets = [instance.classes[k].targets for k in served]
    given = [s for s in sets if s is not None]
    if not given:
        return None
    size = instance.shape.adapter_params
    least = min(given, key=lambda s: (size(1, s), sorted(s)))
    return least if len(given) < len(sets) or len(set(given)) > 1 else given[0]


def _least_optimizer(instance: Instance, members: list[int]) -> frozenset[str]:
    """Return the one optimizer, among those of the classes, that keeps least."""
    return frozenset(
        {min((instance.classes[k].optimizer for k in members), key=lambda kind: (MOMENT_BYTES[kind], kind))}
    )


def quiet_highs() -> "Highs":
    """Return a solver that prints nothing and has one thread."""
    from highspy import Highs

    class Quiet(Highs):
        def enableCallbacks(self) -> None:
            """Do nothing: no callbacks are used, and HiGHS would print its name to standard output."""

    highs = Quiet()
    highs.silent()
    highs.setOptionValue("threads", 1)
    return highs


class Rows(NamedTuple):
    """Hold the LP at some C over x = (z, X, y): upper · x ≤ 0, cover · x = n, and the machine time machine · x."""

    upper: "coo_matrix"
    cover: "coo_matrix"
    machine: np.ndarray
    degree: np.ndarray  # of the groups that x is about
    pairs: np.ndarray  # indices into the types' pairs; their jobs are the last of x


def rows_at(instance: Instance, types: Types, C: float) -> Rows:
    """Write the LP down at C."""
    from scipy.sparse import coo_matrix, vstack

    counts = np.array([n for _, n in instance.counts], dtype=float)
    slot_time = types.steps * types.slot_s[types.t]
    room = C - types.setup[types.t] - types.scoring
    slot_s = np.maximum(types.slot_s[types.t], LEAST)
    most = np.floor((room / types.steps - types.t0[types.t]) / slot_s * (1 + 1e-9))
    most = np.minimum(most, types.limit[types.t])
    kept = np.flatnonzero(most >= 1)
    k, t = types.k[kept], types.t[kept]
    used = np.unique(t)
    where = np.full(len(types.t0), -1)
    where[used] = np.arange(len(used))
    t = where[t]
    T, P = len(used), len(kept)
    degree, t0, setup = types.degree[used], types.t0[used], types.setup[used]
    steps, work = types.steps[kept], slot_time[kept] + types.scoring[kept]
    z, X, pair = np.arange(T), T + np.arange(T), np.arange(P)
    y = 2 * T + pair
    ones = np.ones(P)

    def block(rows: int, *parts: tuple) -> coo_matrix:
        r, c, v = (np.concatenate(column) for column in zip(*parts, strict=True))
        return coo_matrix((v, (r, c)), shape=(rows, 2 * T + P))

    upper = vstack(
        [
            block(T, (z, X, t0), (z, z, setup - C), (t, y, work)),
            block(T, (z, X, -np.ones(T)), (t, y, steps / most[kept])),
            block(P, (pair, y, steps / counts[k]), (pair, T + t, -ones)),
            block(P, (pair, y, 1 / counts[k]), (pair, t, -ones)),
        ]
    )
    cover = block(len(counts), (k, y, ones))
    machine = np.concatenate([degree * instance.cost.compile_s, degree * t0, degree[t] * work])
    return Rows(upper, cover, machine, np.concatenate([degree, degree, degree[t]]), kept)


class Answer(NamedTuple):
    """Hold the least machine time in seconds × devices (∞: none), jobs per pair, the value of a job per class, and
    what a second of a group of each degree costs in seconds × devices.
    """

    machine_s: float
    pairs: np.ndarray  # indices into the types' pairs
    jobs: np.ndarray
    prices: np.ndarray
    rents: dict[int, float]


class ConfigurationLP:
    """Hold the LP of one instance: it is solved at one C after another, each time from the last basis."""

    def __init__(self, instance: Instance, types: Types) -> None:
        self.instance, self.types = instance, types
        self.counts = np.array([n for _, n in instance.counts], dtype=float)
        self.highs = quiet_highs()
        self.highs.setOptionValue("presolve", "off")  # a third faster

    def solve(self, C: float) -> Answer:
        """Solve the LP at C; where every class has a pair it can always be.

        Raises:
            PlanError: the solver failed, from the last basis and from none.
        """
        from highspy import HighsModelStatus
        from scipy.sparse import coo_matrix, vstack

        rows, parts = rows_at(self.instance, self.types, C), _parts(self.instance)
        if len(np.unique(self.types.k[rows.pairs])) < len(self.counts):
            return Answer(np.inf, rows.pairs, np.zeros(0), np.zeros(0), {})
        # the last column: what the largest part is above all machine time
        machine, of = np.append(rows.machine, 0.0), np.append(rows.degree, 0.0)
        excess = np.append(np.zeros(len(rows.machine)), 1.0)
        shares = [coo_matrix(machine * (times * (of >= D) - 1) - excess) for D, times in parts]
        for one in (rows.upper, rows.cover):
            one.resize(one.shape[0], len(machine))
        matrix = vstack([rows.upper, *shares, rows.cover]).tocsc()
        limits = np.zeros(matrix.shape[0] - len(self.counts))
        below = np.concatenate([limits - np.inf, self.counts])
        self._pass(matrix, below, np.concatenate([limits, self.counts]), machine + excess)
        self.highs.run()
        if self.highs.getModelStatus() != HighsModelStatus.kOptimal:
            self.highs.clearSolver()
            self.highs.run()
            if (status := self.highs.getModelStatus()) != HighsModelStatus.kOptimal:
                raise PlanError(f"HiGHS ended with {status.name} on the configuration LP at {C:.1f} s")
        found = self.highs.getSolution()
        duals = np.array(found.row_dual)
        prices, duals = duals[len(limits) :], -duals[len(limits) - len(parts) : len(limits)]
        costs = [(D, dual * times) for (D, times), dual in zip(parts, duals, strict=True)]
        rents = {
            d: d * (1 - sum(duals) + sum(cost for D, cost in costs if d >= D)) for d in self.instance.degrees
        }
        jobs = np.array(found.col_value)[len(machine) - 1 - len(rows.pairs) : -1]
        return Answer(self.highs.getInfo().objective_function_value, rows.pairs, jobs, prices, rents)

    def _pass(self, matrix: "csc_matrix", below: np.ndarray, above: np.ndarray, cost: np.ndarray) -> None:
        """Give the solver an LP, and the last basis where it is of the same size."""
        from highspy import HighsLp, HighsStatus, MatrixFormat

        lp, basis = HighsLp(), self.highs.getBasis()
        lp.num_row_, lp.num_col_ = matrix.shape
        lp.row_lower_, lp.row_upper_, lp.col_cost_ = below, above, cost
        lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), np.full(len(cost), np.inf)
        lp.a_matrix_.format_ = MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.indptr, matrix.indices
        lp.a_matrix_.value_ = matrix.data
        if self.highs.passModel(lp) == HighsStatus.kError:
            raise PlanError("HiGHS refused the configuration LP")
        if basis.valid and (len(basis.row_status), len(basis.col_status)) == matrix.shape:
            self.highs.setBasis(basis)

    def bound(self, low: float) -> float:
        """Return the least C at which V(C) ≤ G · (C − load), from below; `low` is a bound already known.

        Where devices are busy, each has C less the time until it is free.
        """
        load = min(self.instance.load_seconds(d) for d in self.instance.degrees)

        def needed(C: float) -> float:
            return self.instance.level(self.solve(C).machine_s, load)

        need = needed(low)
        if need <= low:
            return low
        high = low
        while need > high:  # C, impossible; need(C) is possible, for V falls with C
            low, high = high, need if np.isfinite(need) else 1.05 * high
            need = needed(high)
        low = max(low, need)  # the least possible C needs no less than a larger one
        near = True  # what C needs hardly changes: the least possible is mostly just above the best bound
        while high - low > PRECISE * low:
            C = low * (1 + PRECISE) if near else (low + high) / 2
            need, near = needed(C), not near
            low, high = (C, min(high, need)) if need > C else (max(low, need), C)
        return low * (1 - SLACK)


def _parts(instance: Instance) -> list[tuple[int, float]]:
    """Return the degrees D of which no whole groups use all devices, and G / G_D; none where devices are busy."""
    G = instance.usable
    return [] if instance.busy else [(D, G / (G // D * D)) for D in instance.degrees if G % D]


class Shares(NamedTuple):
    """Hold the least time in which devices of several types do all jobs together (∞: none), the jobs [type, class] that
    each type does, and what a job of a class is worth to groups of each degree, a type, in machine seconds.
    """

    seconds: float
    jobs: np.ndarray
    worth: list[dict[int, np.ndarray]]


def share(
    instances: Sequence[Instance],
    types: Sequence[Types],
    C: float,
    low: float,
    slower: Sequence[float] | None = None,
) -> Shares:
    """Solve the joint LP of devices of several types, each an instance with all the jobs, at C.

    The rows of every type stand side by side, a job is covered by all types together, and each type's machine time,
    and G / G_D times that of its groups of D devices or more, is at most that of its devices, R_τ(C'); C' ≥ `low` is
    the least. R_τ is convex, so its chord from `low` to C is above it: what a possible C needs is a lower bound, as
    with one type, where the chord is G · (C' − load) itself. `slower` divides each type's machine time, for splits that
    allow for what the LP does not know.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_diag, coo_matrix, hstack, vstack

    rows = [rows_at(instance, own, C) for instance, own in zip(instances, types, strict=True)]
    counts = np.array([n for _, n in instances[0].counts], dtype=float)
    jobs = np.zeros((len(instances), len(counts)))
    served = [own.k[one.pairs] for own, one in zip(types, rows, strict=True)]
    if len(np.unique(np.concatenate(served))) < len(counts):
        return Shares(np.inf, jobs, [])
    ends = np.cumsum([len(one.machine) for one in rows])
    limits, rooms = [], []
    parts = [[(1, 1.0), *_parts(instance)] for instance in instances]
    for n, (instance, one, end) in enumerate(zip(instances, rows, ends, strict=True)):
        load = min(instance.load_seconds(d) for d in instance.degrees)
        there = instance.machine_seconds(C, load)
        slope = (there - instance.machine_seconds(low, load)) / (C - low) if low < C else instance.usable
        rate = slower[n] if slower is not None else 1.0
        for D, times in parts[n]:
            limit = np.zeros(ends[-1] + 1)
            limit[end - len(one.machine) : end] = times * one.machine * (one.degree >= D)
            limit[-1] = -slope / rate
            limits.append(limit)
            rooms.append((there - slope * C) / rate)
    upper = block_diag([one.upper for one in rows])
    upper = hstack([upper, coo_matrix((upper.shape[0], 1))])
    found = linprog(
        np.append(np.zeros(ends[-1]), 1.0),
        A_ub=vstack([upper, coo_matrix(np.array(limits))]).tocsr(),
        b_ub=np.concatenate([np.zeros(upper.shape[0]), rooms]),
        A_eq=hstack([*(one.cover for one in rows), coo_matrix((len(counts), 1))]).tocsr(),
        b_eq=counts,
        bounds=[(0, None)] * int(ends[-1]) + [(low, None)],
        method="highs",
    )
    if found.x is None:
        return Shares(np.inf, jobs, [])
    for own, one, k, end in zip(jobs, rows, served, ends, strict=True):
        np.add.at(own, k, found.x[end - len(one.pairs) : end])
    duals = iter(-found.ineqlin.marginals[-len(limits) :])
    worth = []
    for instance, of in zip(instances, parts, strict=True):
        rents = [(D, times * next(duals)) for D, times in of]
        cost = {d: max(sum(rent for D, rent in rents if d >= D), 1e-9) for d in instance.degrees}
        worth.append({d: found.eqlin.marginals / seconds for d, seconds in cost.items()})
    return Shares(float(found.x[-1]), jobs, worth)


def shared_bound(instances: Sequence[Instance], types: Sequence[Types], low: float) -> float:
    """Return the least C at which the joint LP is feasible, from below; `low` is a bound already known.

    What a possible C needs is a bound, and mostly near; so is what a C that is nearly possible needs a possible one. C
    just above the one, just below the other, and in the middle are tried in turn.
    """
    floor = low

    def needed(C: float) -> float:
        return share(instances, types, C, floor).seconds

    need = needed(low)
    if need <= low:
        return low
    high = low
    while need > high:
        low, high = high, need if np.isfinite(need) else 1.05 * high
        need = needed(high)
    low = max(low, need)
    for turn in count():
        if high - low <= PRECISE * low:
            break
        C = (low * (1 + PRECISE), high * (1 - PRECISE), (low + high) / 2)[turn % 3]
        need = needed(C)
        low, high = (C, min(high, need)) if need > C else (max(low, need), C)
    return low * (1 - SLACK)
