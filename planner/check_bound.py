"""The bound's second opinion: "could all jobs finish within C?", asked anew in plain loops and with cvxpy.

A mode is (length, rank bucket, m, whether gradients are summed over micro-steps, degree, policy, bytes of moments,
adapted sites); of the last two a pack asks for no less than each of its jobs does. The model allows more than any plan
(jobs may be cut, machines are interchangeable, programs fractional); if even that is impossible within C, then C is a
lower bound. Where a plan gives its jobs prices, a fourth argument asks whether any group can earn its share of them.
"""

import math
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from planner.check_models import (
    MOMENTS,
    WEIGHT_BYTES,
    coefficients,
    layer_params,
    pack_bytes,
    params_per_rank,
)
from planner.devices import Devices
from planner.plan import Plan
from planner.specs import JobSpec, ModelShape
from planner.time import CostModel

Way = tuple[int, int, float]  # micro-steps, most slots beside the job, scoring seconds


class _Mode(NamedTuple):
    S: float
    S_max: int
    bucket: int
    m: int
    degree: int
    summed: bool
    moments: int  # bytes an adapter parameter
    width: int  # adapter parameters for each unit of rank
    t0: float
    slot_s: float
    slots: int
    setup: float


Ways = list[tuple[_Mode, Way]]
Part = tuple[Devices, CostModel]  # the devices of one type
CELLS = 5_000  # of the time within which a group earns prices


class _Side(NamedTuple):
    """Hold what one device type may do: its modes, the ways of every kind of job, its devices and their seconds."""

    cost: CostModel
    modes: list[_Mode]
    ways: list[Ways]
    G: int
    seconds: float
    whole: dict[int, float]  # those of the whole groups of each degree and more


def can_finish(
    plan: Plan,
    jobs: list[JobSpec],
    shape: ModelShape,
    parts: list[Part],
    C: float,
    offloads: bool | None = None,
) -> bool:
    """Say whether none of the arguments rules out that all jobs finish within C seconds.

    Where devices are busy, none has more than C less the time until the first is free. `offloads`: whether layer inputs
    may go to the host; None where some job needs it.
    """
    until = list(plan.busy_until) or [0.0] * sum(devices.count for devices, _ in parts)
    left = C - min(until)
    kinds: dict[tuple, list[JobSpec]] = {}
    for job in jobs:
        kinds.setdefault(
            (
                job.row_tokens,
                job.max_row_tokens,
                _bucket(job.rank),
                job.batch_size,
                job.rows,
                job.eval_tokens,
                job.accumulate,
                job.optimizer,
                job.targets,
                job.state_bytes,
            ),
            [],
        ).append(job)
    groups = list(kinds.values())
    if offloads is None:
        offloads = needs_host(jobs, plan.precision, shape, parts)
    sides, first = [], 0
    for devices, cost in parts:
        free = sorted((C - s for s in until[first : first + devices.count]), reverse=True)
        first += devices.count
        policies = (*cost.recompute, *(["offload"] if offloads else []))
        found = _modes([group[0] for group in groups], plan.precision, shape, devices, cost, policies)
        modes = list(dict.fromkeys(found))  # policies that cost the same are one mode
        ways = [
            [(mode, way) for mode in modes if (way := _way(group[0], mode, cost, shape, plan, left))]
            for group in groups
        ]
        if not modes:  # no job fits there
            continue
        smallest = min(mode.degree for mode in modes)
        G = devices.count // smallest * smallest
        load = min(mode.setup for mode in modes) - cost.compile_s
        seconds = sum(max(0.0, own - load) for own in free[:G])
        busy = any(until[first - devices.count : first])
        whole = {d: G // d * d * (left - load) for d in devices.degrees if not busy and d <= G}
        sides.append(_Side(cost, modes, ways, G, seconds, whole))
    if not all(any(side.ways[k] for side in sides) for k in range(len(groups))):
        return False  # some job alone is too long
    if not _counts_fit(groups, sides, left):
        return False
    if plan.prices and not _share_is_earned(plan, groups, sides[0], left):
        return False
    return _machine_time(groups, sides, left) <= 1 + 1e-7


def needs_host(jobs: list[JobSpec], precision: str, shape: ModelShape, parts: list[Part]) -> bool:
    """Say whether some job fits no device group, by one row or a whole batch, unless layer inputs go to the host."""

    def fits(job: JobSpec, devices: Devices, cost: CostModel, degree: int, m: int, policy: str) -> bool:
        summed = job.accumulate or m != job.batch_size
        S, own = -(-job.max_row_tokens // 8) * 8, (MOMENTS[job.optimizer], job.targets, summed)
        slots = [_bucket(job.rank)]
        need = pack_bytes(shape, cost, devices, precision, degree, slots, m, S, policy, *own)
        return need <= devices.spec.memory_bytes * devices.spec.usable

    if any(devices.spec.name == "cpu" for devices, _ in parts):
        return False
    return not all(
        any(
            fits(job, devices, cost, degree, m, policy)
            for devices, cost in parts
            for degree in devices.degrees
            for m in {1, job.batch_size}
            for policy in cost.recompute
        )
        for job in jobs
    )


def _bucket(rank: int) -> int:
    return next((b for b in (8, 16, 32, 64, 128, 256) if rank <= b), -(-rank // 256) * 256)


def _modes(
    jobs: list[JobSpec],
    precision: str,
    shape: ModelShape,
    devices: Devices,
    cost: CostModel,
    policies: tuple[str, ...],
) -> list[_Mode]:
    means = {job.row_tokens * (1 + cost.padding) for job in jobs}
    lengths = {(S, -(-job.max_row_tokens // 8) * 8) for S in means for job in jobs}
    rows = {m for job in jobs for m in range(1, job.batch_size + 1) if job.batch_size % m == 0}
    moments = {MOMENTS[job.optimizer] for job in jobs}
    widths = {params_per_rank(shape, job.targets): job.targets for job in jobs}
    weights = layer_params(shape) * WEIGHT_BYTES[precision] + shape.embedding_params * 2
    out = []
    for S, S_max in lengths:
        for bucket in {_bucket(job.rank) for job in jobs}:
            for m, summed, kept, (width, targets) in product(rows, (True, False), moments, widths.items()):
                for degree in devices.degrees:
                    setup = cost.load_s + weights / degree / cost.load_bytes_s + cost.compile_s
                    for policy in policies:
                        slots = _most_slots(
                            shape,
                            cost,
                            devices,
                            precision,
                            degree,
                            m,
                            S_max,
                            bucket,
                            policy,
                            kept,
                            targets,
                            summed,
                        )
                        if not slots:
                            continue
                        t0, c, a0, a1 = coefficients(shape, cost, degree, policy, precision, S, targets)
                        slot = c * m * S + bucket * (a0 + a1 * m * S)
                        out.append(
                            _Mode(S, S_max, bucket, m, degree, summed, kept, width, t0, slot, slots, setup)
                        )
    return out


def _most_slots(
    shape: ModelShape,
    cost: CostModel,
    devices: Devices,
    precision: str,
    degree: int,
    m: int,
    S_max: int,
    bucket: int,
    policy: str,
    moments: int,
    targets: frozenset[str] | None,
    summed: bool,
) -> int:
    """Return the most slots that fit, by trying J with the checker's own memory formula."""
    limit = devices.spec.memory_bytes * devices.spec.usable

    def fits(J: int) -> bool:
        need = pack_bytes(
            shape,
            cost,
            devices,
            precision,
            degree,
            [bucket] * J,
            m,
            S_max,
            policy,
            moments,
            targets,
            summed,
        )
        return need <= limit

    low, high = 0, 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _way(job: JobSpec, mode: _Mode, cost: CostModel, shape: ModelShape, plan: Plan, C: float) -> Way | None:
    """Return (micro-steps, most slots beside it, scoring seconds) of a job in a mode, or None where it cannot
    be.
    """
    length = -(-job.max_row_tokens // 8) * 8
    if not mode.summed and (job.accumulate or job.batch_size != mode.m):
        return None
    if MOMENTS[job.optimizer] > mode.moments or params_per_rank(shape, job.targets) > mode.width:
        return None
    if job.batch_size % mode.m or _bucket(job.rank) > mode.bucket or length > mode.S_max:
        return None
    if job.row_tokens * (1 + cost.padding) > mode.S:
        return None
    steps = math.ceil(job.rows / mode.m)
    _, c, _, _ = coefficients(shape, cost, mode.degree, "none", plan.precision, job.row_tokens, job.targets)
    scoring = cost.export_s + c * job.eval_tokens / 2 + job.state_bytes / cost.state_bytes_s
    room = (C - mode.setup - scoring) / steps - mode.t0
    most = min(mode.slots, math.floor(room / max(mode.slot_s, 1e-30) + 1e-9))  # a slot may cost nothing
    return (steps, most, scoring) if most >= 1 else None


def _counts_fit(groups: list[list[JobSpec]], sides: list[_Side], C: float) -> bool:
    """Say whether groups of devices can hold the heaviest h jobs for every h, whole jobs only."""
    least: list[dict[int, list[float]]] = []  # of each side, by degree: seconds of a job of each kind
    for side in sides:
        least.append({d: [] for d in sorted({mode.degree for mode in side.modes})})
        for options in side.ways:
            for d, own in least[-1].items():
                times = [
                    steps * (mode.t0 / most + mode.slot_s) + scoring
                    for mode, (steps, most, scoring) in options
                    if mode.degree == d
                ]
                own.append(min(times, default=math.inf))
    weights = [min(d * own[k] for one in least for d, own in one.items()) for k in range(len(groups))]
    order = sorted(range(len(groups)), key=lambda k: -weights[k])
    for h in range(1, len(order) + 1):
        heavy = order[:h]
        most_jobs = 0
        for side, one in zip(sides, least, strict=True):
            holds = [0] * (side.G + 1)
            for g in range(1, side.G + 1):
                holds[g] = holds[g - 1]
                for d, own in one.items():
                    lightest = min(own[k] for k in heavy)
                    setup = min(mode.setup for mode in side.modes if mode.degree == d)
                    if d <= g and lightest < math.inf and setup < C:
                        holds[g] = max(holds[g], holds[g - d] + math.floor((C - setup) / lightest + 1e-9))
            most_jobs += holds[side.G]
        if sum(len(groups[k]) for k in heavy) > most_jobs:
            return False
    return True


def _share_is_earned(plan: Plan, groups: list[list[JobSpec]], side: _Side, C: float) -> bool:
    """Say whether a group of any degree can earn, within C, its share of the prices of all jobs.

    If none can, not all jobs are done: the groups' earnings would be below the sum of all prices.
    """
    prices = [plan.prices[group[0].job_id] for group in groups]
    share = sum(price * len(group) for price, group in zip(prices, groups, strict=True)) / side.G
    for d in sorted({mode.degree for mode in side.modes}):
        goal = d * share * (1 - 1e-9)
        own = [  # policies that cost the same are one mode
            list({mode: way for mode, way in options if mode.degree == d}.items()) for options in side.ways
        ]
        scored = [
            min((way[2] for _, way in options), default=math.inf) / price
            for options, price in zip(own, prices, strict=True)
            if price > 0
        ]
        compile_s = side.cost.compile_s
        load = min(mode.setup for mode in side.modes if mode.degree == d) - compile_s
        room = C - load - goal * min(scored)
        if room > 0 and _most_earned(groups, own, prices, compile_s, room) >= goal:
            return True
    return False


def _most_earned(
    groups: list[list[JobSpec]], ways: list[Ways], prices: list[float], compile_s: float, room: float
) -> float:
    """Return the most that packs, one after another, earn within some seconds, times cut down to cells."""
    best = [0.0] * (CELLS + 1)  # earned by one pack of so many cells
    at: dict[
        _Mode, list[tuple[float, int, int]]
    ] = {}  # price a step, steps, jobs of each class that may be in it
    for group, options, price in zip(groups, ways, prices, strict=True):
        for mode, (steps, _, _) in options:
            at.setdefault(mode, []).append((price / steps, steps, len(group)))
    for mode, jobs in at.items():
        jobs.sort(reverse=True)
        for length in _lengths({steps for _, steps, _ in jobs}, (room - compile_s) / (mode.t0 + mode.slot_s)):
            fit = [job for job in jobs if job[1] <= length]
            work = [0, *accumulate(steps * n for _, steps, n in fit)]
            earned = [0.0, *accumulate(rate * steps * n for rate, steps, n in fit)]
            whole = 0
            for J in range(1, mode.slots + 1):
                seconds = compile_s + length * (mode.t0 + J * mode.slot_s)
                while whole < len(fit) and work[whole + 1] <= J * length:
                    whole += 1
                if seconds > room:
                    break
                part = (J * length - work[whole]) * fit[whole][0] if whole < len(fit) else 0.0
                cell = int(seconds / room * CELLS)
                best[cell] = max(best[cell], earned[whole] + part)
                if whole == len(fit):
                    break
    packs: list[tuple[int, float]] = []
    for cell, value in enumerate(best):
        if value > (packs[-1][1] if packs else 0.0):
            packs.append((cell, value))
    most = [0.0] * (CELLS + 1)
    for cell, value in packs:
        if most[cell] < value:
            for i in range(cell, CELLS + 1):
                most[i] = max(most[i], most[i - cell] + value)
    return most[-1]


def _lengths(steps: set[int], longest: float) -> list[int]:
    """Return the micro-steps that jobs one after another may have."""
    sums: set[int] = set()
    last = {0}
    while last:
        last = {a + b for a in last for b in steps if a + b <= longest} - sums
        sums |= last
    return sorted(sums)


def _machine_time(groups: list[list[JobSpec]], sides: list[_Side], C: float) -> float:
    """Return the least share u of the devices' time that programs need to run every job within C, the same for every
    device type, by a linear program; ∞ where they cannot.
    """
    import cvxpy as cp
    from scipy.sparse import csr_matrix

    u = cp.Variable()
    covered: Any = 0
    rules: list[Any] = []
    for side in sides:
        modes = sorted({mode for options in side.ways for mode, _ in options})
        at = {mode: i for i, mode in enumerate(modes)}
        pairs = [(k, at[mode], way) for k, options in enumerate(side.ways) for mode, way in options]
        if not pairs:
            continue
        of_class, of_mode = [k for k, _, _ in pairs], [i for _, i, _ in pairs]
        programs, steps = cp.Variable(len(modes), nonneg=True), cp.Variable(len(modes), nonneg=True)
        jobs = cp.Variable(len(pairs), nonneg=True)

        def sums(values: list[float], rows: list[int], n: int) -> csr_matrix:
            return csr_matrix((values, (rows, range(len(values)))), shape=(n, len(values)))

        work = sums([way[0] * modes[i].slot_s + way[2] for _, i, way in pairs], of_mode, len(modes))
        share = sums([way[0] / way[1] for _, _, way in pairs], of_mode, len(modes))
        cover = sums([1.0] * len(pairs), of_class, len(groups))
        mine = csr_matrix((np.ones(len(pairs)), (range(len(pairs)), of_mode)), shape=(len(pairs), len(modes)))
        n = np.array([len(groups[k]) for k in of_class], dtype=float)
        own_steps = np.array([way[0] for _, _, way in pairs], dtype=float)
        degree = np.array([mode.degree for mode in modes], dtype=float)
        busy = cp.multiply(np.array([mode.t0 for mode in modes]), steps) + work @ jobs
        covered, seconds = covered + cover @ jobs, side.cost.compile_s * programs + busy
        rules += [
            degree @ seconds <= u * side.seconds,
            *((degree * (degree >= d)) @ seconds <= u * most for d, most in side.whole.items()),
            busy <= cp.multiply(np.array([C - mode.setup for mode in modes]), programs),
            share @ jobs <= steps,
            cp.multiply(own_steps / n, jobs) <= mine @ steps,
            cp.multiply(1 / n, jobs) <= mine @ programs,
        ]
    everyone = np.array([float(len(group)) for group in groups])
    problem = cp.Problem(cp.Minimize(u), [covered == everyone, *rules])
    problem.solve(solver=cp.HIGHS, log_to_console=False)
    return float(problem.value) if problem.value is not None else math.inf
