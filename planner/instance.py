"""The planning problem in the form the solvers work on: classes of interchangeable jobs, and cached
coefficients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from planner.devices import Devices
from planner.errors import PlanError
from planner.memory import PINNED, StepShape, offloaded_bytes, step_memory
from planner.signature import LAST_RESORT, POLICIES, divisors, length_bucket
from planner.specs import PRECISION_BYTES, JobSpec, ModelShape
from planner.time import CostModel, StepCost

Counts = tuple[
    tuple[int, int], ...
]  # (class, number of its jobs), sorted by class: a set of jobs up to exchange


class Need(NamedTuple):
    """Hold what a set of jobs asks of its pack's program, before J, m and policy are chosen."""

    divisor: int
    bucket: int
    S_max: int
    S: float
    optimizers: frozenset[str]
    targets: frozenset[str] | None
    whole: int  # the m at which every micro-step ends every job's batch, so that no gradients are summed; 0: none


@dataclass
class Instance:
    """Hold one planning problem; it grows caches as solvers ask, its inputs never change."""

    jobs: list[JobSpec]
    shape: ModelShape
    devices: Devices
    precision: str
    cost: CostModel
    max_slots: int = 256
    policies: tuple[str, ...] = POLICIES
    busy: tuple[float, ...] = ()  # seconds until each device is free; (): all are
    shared: bool = False  # devices of another type take the jobs that fit none of these
    first: int = 0  # number of the first device, where there are several types
    classes: list[JobSpec] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    cache: dict = field(default_factory=dict)  # coefficients
    needs: dict = field(default_factory=dict)  # classes -> what they ask together
    packs: dict = field(default_factory=dict)  # (jobs, degree) -> the pack chosen
    layouts: dict = field(default_factory=dict)  # (micro-steps of the jobs, J) -> the pack's micro-steps
    met: dict | None = None  # (degree, jobs) -> the fastest group that a search met; None: not kept

    def __post_init__(self) -> None:
        if self.precision not in PRECISION_BYTES:
            raise PlanError(f"precision {self.precision!r}; allowed is {', '.join(PRECISION_BYTES)}")
        if self.busy and len(self.busy) != self.devices.count:
            raise PlanError(
                f"busy_until has {len(self.busy)} numbers for {self.devices.count} devices; give one each"
            )
        if not all(math.isfinite(s) and s >= 0 for s in self.busy):
            raise PlanError(f"busy_until is {self.busy}; seconds of at least 0 are needed")
        groups: dict[tuple, list[JobSpec]] = {}
        for job in self.jobs:
            groups.setdefault(job.shape_key(), []).append(job)
        order = sorted(groups, key=lambda k: (k[1], k[2], k[0], k[4], k[3], k[5], repr(k[6:])))
        self.classes = [groups[key][0] for key in order]
        self.members = [sorted(job.job_id for job in groups[key]) for key in order]

    def of(self, jobs: list[JobSpec]) -> "Instance":
        """Return the problem of these devices with other jobs."""
        return Instance(
            jobs,
            self.shape,
            self.devices,
            self.precision,
            self.cost,
            self.max_slots,
            self.policies,
            self.busy,
        )

    @property
    def n_jobs(self) -> int:
        """Count the jobs."""
        return len(self.jobs)

    @property
    def limit(self) -> int:
        """Return the bytes a step may use on each device."""
        return self.devices.spec.limit_bytes

    @cached_property
    def counts(self) -> Counts:
        """Return all jobs as counts of classes."""
        return tuple((k, len(ids)) for k, ids in enumerate(self.members))

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Return the group sizes that hold at least one of the jobs.

        Raises:
            PlanError: some job fits no group, and these are all devices; the message says what would.
        """
        K = range(len(self.classes))
        holds = {d: [self.fits_alone(k, d) for k in K] for d in self.devices.degrees}
        if not self.shared and not all(any(holds[d][k] for d in holds) for k in K):
            self._nothing_fits()
        return tuple(d for d in holds if any(holds[d]))

    @cached_property
    def usable(self) -> int:
        """Return the devices that can work at one time: groups are multiples of the smallest degree."""
        return self.devices.count // self.degrees[0] * self.degrees[0]

    def free_at(self, on: tuple[int, ...]) -> float:
        """Return when the last of some devices is free; of unnamed ones, at once."""
        return max((self.busy[device] for device in on), default=0.0)

    def level(self, machine_s: float, setup: float) -> float:
        """Return the least C by which the usable devices, those free first, have so many seconds in all, each after a
        set-up.
        """
        starts = sorted(self.busy)[: self.usable] or [0.0] * self.usable
        total = 0.0
        for n, start in enumerate(starts, 1):
            total += start
            C = (machine_s + total) / n + setup
            if n == len(starts) or C - setup <= starts[n]:
                return C
        raise AssertionError

    def machine_seconds(self, C: float, setup: float) -> float:
        """Return the seconds that the usable devices, those free first, have in all until C, each after a set-up."""
        starts = sorted(self.busy)[: self.usable] or [0.0] * self.usable
        return sum(max(0.0, C - setup - start) for start in starts)

    def fits(self, k: int) -> bool:
        """Say whether some group can run a job of a class."""
        return any(self.fits_alone(k, degree) for degree in self.devices.degrees)

    def fits_alone(self, k: int, degree: int) -> bool:
        """Say whether one job of a class can run by itself on a group of this degree."""
        need = self.need(((k, 1),))
        return any(
            self.slot_limit(degree, m, policy, need) for m in thriftiest(need) for policy in self.policies
        )

    def _nothing_fits(self) -> None:
        spec, count, top = self.devices.spec, self.devices.count, self.devices.degrees[-1]
        worst = max(range(len(self.classes)), key=lambda k: self.least_memory(k, 1, self.precision))
        job = self.classes[worst]
        need = self.least_memory(worst, top, self.precision) / 2**30
        head = (
            f"{self.shape.name} in {self.precision} with job {job.job_id} (rank {job.rank}, "
            f"{job.max_row_tokens} tokens) needs {need:.1f} GiB "
            f"on each of {top} {spec.name}, which may use {self.limit / 2**30:.1f} GiB"
        )
        advice = []
        most = min(spec.max_degree, spec.node_size)
        for d in (2, 4, 8, 16, 32, 64):
            if count < d <= most and self.least_memory(worst, d, self.precision) <= self.limit:
                advice.append(f"{d} devices would hold it")
                break
        for precision in ("bf16", *(["fp8"] if spec.fp8 else []), "int8", "nf4"):
            if PRECISION_BYTES[precision] < PRECISION_BYTES[self.precision] and (
                self.least_memory(worst, top, precision) <= self.limit
            ):
                advice.append(f"precision {precision} would fit")
                break
        raise PlanError(head + "; " + (" or ".join(advice) or "shorten max_length, or use larger devices"))

    def least_memory(self, k: int, degree: int, precision: str) -> int:
        """Return the bytes a device needs for one job of a class alone under the thriftiest policy."""
        need = self.need(((k, 1),))
        steps = [step_shape(degree, 1, m, "layer", need) for m in thriftiest(need)]
        return min(
            step_memory(self.shape, step, precision, self.devices.spec, self.cost.memory) for step in steps
        )

    @cached_property
    def own_needs(self) -> list[Need]:
        """Return what each class alone asks of a program."""
        return [
            Need(
                job.batch_size,
                job.bucket,
                length_bucket(job.max_row_tokens),
                job.row_tokens * (1 + self.cost.padding),
                frozenset({job.optimizer}),
                job.targets,
                0 if job.accumulate else job.batch_size,
            )
            for job in self.classes
        ]

    def need(self, counts: Counts) -> Need:
        """Return what a set of jobs asks of one pack's program."""
        if len(counts) == 1:
            return self.own_needs[counts[0][0]]
        key = tuple([k for k, _ in counts])
        if key not in self.needs:
            divisors, buckets, longest, lengths, optimizers, targets, wholes = zip(
                *[self.own_needs[k] for k in key], strict=True
            )
            S, S_max = max(lengths), max(longest)
            if len({self.classes[k].data for k in key}) > 1:
                S = max(S, min(S * (1 + self.cost.mixed_padding), float(S_max)))
            self.needs[key] = Need(
                math.gcd(*divisors),
                max(buckets),
                S_max,
                S,
                frozenset().union(*optimizers),
                None if None in targets else frozenset().union(*targets),
                wholes[0] if len(set(wholes)) == 1 else 0,
            )
        return self.needs[key]

    def memory(self, degree: int, J: int, m: int, policy: str, need: Need) -> int:
        """Predict the bytes of a packed step on each device."""
        step = step_shape(degree, J, m, policy, need)
        return step_memory(self.shape, step, self.precision, self.devices.spec, self.cost.memory)

    def slot_limit(self, degree: int, m: int, policy: str, need: Need) -> int:
        """Return the largest J whose step fits the memory limit; 0 where none does. More slots never take less."""
        sums = m != need.whole
        key = ("slots", degree, m, policy, need.bucket, need.S_max, need.optimizers, need.targets, sums)
        if key not in self.cache:
            limit = self._slot_limit(lambda J: self.memory(degree, J, m, policy, need))
            if policy == LAST_RESORT:
                step = step_shape(degree, 1, m, policy, need)
                limit = min(limit, int(PINNED / offloaded_bytes(self.shape, step, self.precision)))
            self.cache[key] = limit
        return self.cache[key]

    def _slot_limit(self, memory: Callable[[int], int]) -> int:
        """Search the limit where a line between known points crosses it: memory is nearly one."""
        low, high = 1, self.max_slots
        below, above = memory(low), memory(high)
        if below > self.limit:
            return 0
        if above <= self.limit:
            return high
        while high - low > 1:
            share = (self.limit - below) / (above - below)
            J = min(max(low + int(share * (high - low)), low + 1), high - 1)
            taken = memory(J)
            if taken <= self.limit:
                low, below = J, taken
            else:
                high, above = J, taken
        return low

    def programs(self, degree: int, need: Need) -> list[tuple[int, list[tuple[float, float, int, str]]]]:
        """List what may serve a need: for each m, (t0, seconds a slot adds, most slots, policy), none
        dominated.
        """
        key = ("programs", degree, need)
        if key not in self.cache:
            out = []
            for m in divisors(need.divisor):
                rows: list[tuple[float, float, int, str]] = []
                for policy in self.policies:
                    limit = self.slot_limit(degree, m, policy, need)
                    cost = self.step_cost(degree, policy, need)
                    slot = cost.c * m * need.S + (cost.a0 + cost.a1 * m * need.S) * need.bucket
                    rows.append((cost.t0, slot, limit, policy))
                rows = [
                    row for i, row in enumerate(rows)
                    if row[2] and not any(_dominates(b, row, j < i) for j, b in enumerate(rows) if j != i)
                ]  # fmt: skip
                if rows:
                    out.append((m, rows))
            self.cache[key] = out
        return self.cache[key]

    def steps(self, m: int) -> list[int]:
        """Return the micro-steps of a job of each class at m."""
        key = ("steps", m)
        if key not in self.cache:
            self.cache[key] = [job.micro_steps(m) for job in self.classes]
        return self.cache[key]

    def step_cost(self, degree: int, policy: str, need: Need) -> StepCost:
        """Return the time coefficients of a pack's step."""
        key = ("cost", degree, policy, need.S, need.targets)
        if key not in self.cache:
            self.cache[key] = self.cost.step_cost(
                self.shape, degree, policy, self.precision, need.S, need.targets
            )
        return self.cache[key]

    def eval_seconds(self, degree: int, k: int) -> float:
        """Return the time to score and export one job of a class."""
        key = ("eval", degree, k)
        if key not in self.cache:
            job = self.classes[k]
            cost = self.cost.step_cost(
                self.shape, degree, "none", self.precision, job.row_tokens, job.targets
            )
            self.cache[key] = self.cost.eval_seconds(cost, job.eval_tokens, job.state_bytes)
        return self.cache[key]

    def scoring(self, degree: int) -> list[float]:
        """Return the time to score and export one job of each class."""
        key = ("scoring", degree)
        if key not in self.cache:
            self.cache[key] = [self.eval_seconds(degree, k) for k in range(len(self.classes))]
        return self.cache[key]

    def load_seconds(self, degree: int) -> float:
        """Return the time to bring the base onto a group."""
        return self.cost.load_seconds(self.shape, degree, self.precision)


def step_shape(degree: int, J: int, m: int, policy: str, need: Need) -> StepShape:
    """Return the sizes of a program's step."""
    return StepShape(
        degree,
        J,
        m,
        need.S_max,
        need.bucket,
        policy,
        need.optimizers,
        need.targets,
        accumulate=m != need.whole,
    )


def thriftiest(need: Need) -> set[int]:
    """Return the m that may take the least memory: 1, or a whole batch, of which no sum of gradients is kept."""
    return {1, need.whole or 1}


def _dominates(a: tuple, b: tuple, first: bool) -> bool:
    """Say whether one way of running a program is never worse than another; of equals the first stays."""
    never_worse = a[0] <= b[0] and a[1] <= b[1] and a[2] >= b[2]
    return never_worse and (first or a[:3] != b[:3])
