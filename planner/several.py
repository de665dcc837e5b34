"""Several sweeps, each of a model of its own, on one machine: how many devices each gets, so that the last ends early.

A device belongs to one sweep for the whole plan. Let t_k(g) be the least makespan of sweep k on g devices; it never
rises with g, for devices may idle. Take any deal d of all G devices and any sweep l. Every deal gives l no more than
d_l, or else some other sweep j fewer than d_j. So no deal ends before

    min(t_l(d_l), min over j ≠ l of t_j(d_j − 1)),

nor before the same of lower bounds L_k ≤ t_k. Deal one device after another to the sweep whose bound is largest, and
let l be that of the largest bound in the end: j got its last device when L_j(d_j − 1) was the largest, so the minimum
is L_l(d_l), which the deal itself has, and no deal has a smaller largest bound. All makespans and bounds are without
the recompute policy "offload", which is for sweeps that are planned alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from planner.api import Options, make_plan
from planner.devices import Devices, Mixture
from planner.errors import PlanError
from planner.instance import Instance
from planner.ours import bounds
from planner.plan import SCHEMA, Plan
from planner.specs import JobSpec, ModelShape, check_jobs
from planner.time import CostModel, cost_models

TRIES = 16  # bounds and plans made to find a better deal than that of the bounds
NEAR = 1e-4  # bounds so near to each other are taken for one
FEW_DEVICES = 64  # to deal, above which one more or less matters too little to try


class Problem(NamedTuple):
    """Hold one sweep to plan beside others."""

    name: str
    jobs: Sequence[JobSpec]
    shape: ModelShape
    precision: str = "bf16"
    cost_model: CostModel | Mapping[str, CostModel] | None = None
    options: Options = Options()


@dataclass(frozen=True)
class Share:
    """Hold one sweep's devices, by their numbers on the machine, and its plan, which numbers them from 0.

    On `too_few` devices the sweep does not end before the bound on all sweeps; where that follows from prices of jobs,
    those are in `prices`. No deal gives every sweep more than that: it would take more devices than there are.
    """

    name: str
    devices: tuple[int, ...]
    plan: Plan
    too_few: int
    prices: dict[str, float] = field(default_factory=dict)

    @property
    def placed(self) -> Plan:
        """Return the plan in the machine's numbers."""
        on = [tuple(self.devices[n] for n in pack.devices) for pack in self.plan.packs]
        packs = [replace(pack, devices=where) for pack, where in zip(self.plan.packs, on, strict=True)]
        return replace(self.plan, packs=tuple(packs))


@dataclass(frozen=True)
class SeveralPlan:
    """Hold the plans of several sweeps on one machine; those not in any share of its `device_count` devices idle.

    `in_turn_s` is a lower bound, too: on what the sweeps take one after another, each on all devices.
    """

    device: str
    device_count: int
    lower_bound_s: float
    in_turn_s: float
    sweeps: tuple[Share, ...]

    @property
    def makespan_s(self) -> float:
        """Return when the last sweep ends."""
        return max(share.plan.makespan_s for share in self.sweeps)

    @property
    def gap(self) -> float:
        """Return how far the makespan may be above the best possible with devices of their own, as a share."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    def to_json(self) -> str:
        """Return the plan as indented JSON, each sweep's as `Plan.to_json` has it."""
        sweeps = [{**vars(share), "plan": share.plan.to_dict()} for share in self.sweeps]
        head = {"schema": SCHEMA, "makespan_s": self.makespan_s, "gap": self.gap}
        return json.dumps({**head, **vars(self), "sweeps": sweeps}, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "SeveralPlan":
        """Read a plan of several sweeps.

        Raises:
            PlanError: not JSON, another schema version, or a field missing or unknown.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw["schema"] != SCHEMA:
                raise PlanError(f"plan has schema {raw['schema']}; this version reads schema {SCHEMA}")
            shares = []
            for one in raw["sweeps"]:
                own, plan = tuple(one["devices"]), Plan.from_json(json.dumps(one["plan"]))
                shares.append(Share(**{**one, "devices": own, "plan": plan}))
            head = {name: raw[name] for name in ("device", "device_count", "lower_bound_s", "in_turn_s")}
            return SeveralPlan(**head, sweeps=tuple(shares))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"this is not a plan of several sweeps: {type(error).__name__}: {error}"
            ) from None


class _Sweep:
    """Hold what is known of one sweep by its devices: `least`, which it needs, and n more, at the `most` all others."""

    def __init__(self, problem: Problem, devices: Devices) -> None:
        self.problem, self.spec = problem, devices.spec
        self.jobs, _ = check_jobs(list(problem.jobs), problem.shape)
        (self.cost,) = cost_models(devices, problem.cost_model).values()
        whole = self.instance(devices.count)
        self.least = max(
            next(d for d in whole.degrees if whole.fits_alone(k, d)) for k in range(len(whole.classes))
        )
        self.most = devices.count - self.least
        self.bounds: dict[int, float] = {}
        self.prices: dict[int, dict[str, float]] = {}
        self.plans: dict[int, Plan] = {}

    def instance(self, count: int) -> Instance:
        """Return the sweep's problem on so many devices."""
        _, _, shape, precision, _, options = self.problem
        limits = options.max_slots, options.policies
        return Instance(self.jobs, shape, Devices(self.spec, count), precision, self.cost, *limits)

    def bound(self, n: int) -> None:
        """Find the lower bound with n devices more, unless it is known."""
        if n not in self.bounds:
            instance = self.instance(self.least + n)
            self.bounds[n], kind, prices, _ = bounds(instance)
            priced = zip(prices.tolist(), instance.members, strict=True) if kind == "groups" else ()
            self.prices[n] = {name: price for price, ids in priced for name in ids}

    def make(self, n: int, options: Options) -> Plan:
        """Plan the sweep with n devices more."""
        _, _, shape, precision, cost, _ = self.problem
        on = Devices(self.spec, self.least + n)
        return make_plan(self.jobs, shape, on, precision=precision, cost_model=cost, options=options)

    def plan(self, n: int) -> None:
        """Plan the sweep with n devices more, unless that is done; without early stops, as bounds have none."""
        if n not in self.plans:
            self.plans[n] = self.make(n, replace(self.problem.options, early_stop=None))

    def known(self) -> tuple[list[int], np.ndarray]:
        """Return where bounds are known, and there the best of all that hold: a bound holds for fewer devices, too."""
        at = sorted(self.bounds)
        return at, np.maximum.accumulate([self.bounds[n] for n in reversed(at)])[::-1]

    def about(self, spare: int) -> np.ndarray:
        """Return the bound with 0 to `spare` devices more, as a + b / g devices between two that are known."""
        at, seconds = self.known()
        return np.interp(-1 / (self.least + np.arange(spare + 1)), -1 / (self.least + np.array(at)), seconds)

    def at_least(self, spare: int) -> np.ndarray:
        """Return what is proven of the makespan with 0 to `spare` devices more."""
        at, seconds = self.known()
        return seconds[np.searchsorted(at, np.arange(spare + 1))]

    def ends(self, times: np.ndarray) -> np.ndarray:
        """Return the makespans of the plans made, and of no plan `times`, between those with fewer and more devices."""
        times, best = times.copy(), math.inf
        for n in sorted(self.plans):
            best = min(best, self.plans[n].makespan_s)
            times[:n] = np.maximum(times[:n], best)
            times[n:] = np.minimum(times[n:], best)  # the rest may idle
            times[n] = best
        return times


def deal(times: Sequence[np.ndarray], spare: int) -> tuple[list[int], float]:
    """Return how many devices each sweep gets beyond those it needs, and when the last one ends, if sweep k ends at
    `times[k][n]` with n more.
    """
    given = [0] * len(times)
    for _ in range(spare):
        given[max(range(len(times)), key=lambda k: times[k][given[k]])] += 1
    return given, float(max(own[n] for own, n in zip(times, given, strict=True)))


def plan_several(problems: Sequence[Problem], devices: Devices | Mixture) -> SeveralPlan:
    """Plan several sweeps on devices of one type, each on devices of its own, so that the last ends early.

    Raises:
        PlanError: a sweep that cannot be planned, fewer devices than they need, devices of several types.
    """
    if isinstance(devices, Mixture):
        raise PlanError(f"several sweeps are planned on devices of one type, not on {devices}")
    names = [problem.name for problem in problems]
    if len(set(names)) < len(names) or not names:
        raise PlanError(f"sweeps {', '.join(names) or '(none)'}: at least one, each of another name")
    sweeps = []
    for problem in problems:
        try:
            sweeps.append(_Sweep(problem, devices))
        except PlanError as error:
            raise PlanError(f"{problem.name}: {error}") from None
    spare = devices.count - sum(sweep.least for sweep in sweeps)
    if spare < 0:
        needs = ", ".join(f"{name} {sweep.least}" for name, sweep in zip(names, sweeps, strict=True))
        raise PlanError(
            f"{devices} are too few for devices of their own: the sweeps need at least {needs}; "
            "run them one after another, or give more devices (a sweep that is planned alone may need fewer, with "
            "layer inputs in the host's memory)"
        )
    by_bounds, bound = _by_bounds(sweeps, spare)
    plans = []
    for sweep, n in zip(sweeps, _by_plans(sweeps, spare, by_bounds), strict=True):
        options = sweep.problem.options
        plans.append(sweep.plans[n] if options.early_stop is None else sweep.make(n, options))
    shares = []
    for sweep, plan, where in zip(sweeps, plans, numbers(plans, devices), strict=True):
        proof = max((n for n, seconds in sweep.bounds.items() if seconds >= bound), default=-1)
        prices = sweep.prices.get(proof, {})
        shares.append(Share(sweep.problem.name, where, plan, sweep.least + proof, prices))
    in_turn = sum(sweep.bounds[sweep.most] for sweep in sweeps)
    return SeveralPlan(devices.spec.name, devices.count, bound, in_turn, tuple(shares))


def _by_bounds(sweeps: Sequence[_Sweep], spare: int) -> tuple[list[int], float]:
    """Return the deal whose largest bound is least, and that bound; bounds are found where an estimate needs them."""
    for sweep in sweeps:
        sweep.bound(0)
        sweep.bound(sweep.most)
    floor = max(sweep.bounds[sweep.most] for sweep in sweeps)
    while True:
        given, seconds = deal([sweep.about(spare) for sweep in sweeps], spare)
        known = [
            sweep.at_least(spare)[n] if n in sweep.bounds else math.inf
            for sweep, n in zip(sweeps, given, strict=True)
        ]
        if max(known) <= floor * (1 + NEAR):  # more devices would end none sooner
            return given, floor
        new = [(sweep, n) for sweep, n in zip(sweeps, given, strict=True) if n not in sweep.bounds]
        if not new:  # then those with one device less
            new = [
                (sweep, n - 1)
                for sweep, n in zip(sweeps, given, strict=True)
                if n and n - 1 not in sweep.bounds
            ]
        if not new:
            return given, seconds
        for sweep, n in new:
            sweep.bound(n)


def _by_plans(sweeps: Sequence[_Sweep], spare: int, start: Sequence[int]) -> list[int]:
    """Return the best deal by plans: `start`, or a better one that bounds allow and plans then show to be so."""
    for sweep, n in zip(sweeps, start, strict=True):
        sweep.plan(n)
    none = np.full(spare + 1, math.inf)
    for _ in range(TRIES if spare <= FEW_DEVICES else 0):
        _, best = deal([sweep.ends(none) for sweep in sweeps], spare)
        times = [sweep.ends(sweep.at_least(spare)) for sweep in sweeps]
        given, end = deal(times, spare)
        new = [k for k, n in enumerate(given) if n not in sweeps[k].plans]
        if not new or end >= best * (1 - 1e-9):
            break
        unbounded = [k for k in new if given[k] not in sweeps[k].bounds]
        for k in unbounded:
            sweeps[k].bound(given[k])
        if not unbounded:  # what is likely to be too late is planned first
            k = max(new, key=lambda k: times[k][given[k]])
            sweeps[k].plan(given[k])
    given, _ = deal([sweep.ends(none) for sweep in sweeps], spare)
    for sweep, most in zip(sweeps, given, strict=True):
        plan = min((sweep.plans[n] for n in sweep.plans if n <= most), key=lambda plan: plan.makespan_s)
        used = len({n for pack in plan.packs for n in pack.devices})
        sweep.plan(max(used - sweep.least, 0))
    return [  # the devices that made a sweep no faster idle
        min((n for n in sweep.plans if n <= most), key=lambda n: (sweep.plans[n].makespan_s, n))
        for sweep, most in zip(sweeps, given, strict=True)
    ]


def numbers(plans: Sequence[Plan], devices: Devices) -> list[tuple[int, ...]]:
    """Return the numbers on the machine of each plan's devices: in a row, unless a pack would then straddle hosts.

    Otherwise each plan's are cut into blocks of powers of two, as its groups are, and larger blocks come first.
    """
    host, where, first = devices.spec.node_size, [], 0
    for plan in plans:
        where.append(tuple(range(first, first + plan.device_count)))
        first += plan.device_count
    if not any(straddles(plan, own, host) for plan, own in zip(plans, where, strict=True)):
        return where
    blocks = []
    for k, plan in enumerate(plans):
        at = 0
        while at < plan.device_count:
            size = min(host, 2 ** ((plan.device_count - at).bit_length() - 1))
            blocks.append((-size, k, at))
            at += size
    found: list[dict[int, int]] = [{} for _ in plans]
    first = 0
    for size, k, at in sorted(blocks):
        found[k] |= {at + n: first + n for n in range(-size)}
        first -= size
    return [tuple(own[n] for n in range(len(own))) for own in found]


def straddles(plan: Plan, where: Sequence[int], host: int) -> bool:
    """Say whether some pack, on devices of these numbers, is on several hosts."""
    return any(len({where[n] // host for n in pack.devices}) > 1 for pack in plan.packs)
