"""`make_plan`: from jobs, a model and devices to the best plan of all methods, with its bound."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.baselines import dealt_singly, first_fit, max_gpu_s, min_gpu_s, sequential
from planner.build import build_plan
from planner.config_lp import make_types
from planner.devices import Devices, Mixture
from planner.errors import PlanError
from planner.groups import makespan
from planner.incumbent import repair
from planner.instance import Instance
from planner.mixture import any_of, check_fits, mixed, mixed_bound, mixed_makespan, on_type, repair_mixed
from planner.ours import FEW, Bound, Effort, bounds, ours
from planner.placed import Placed, place
from planner.plan import Pack, Plan
from planner.published import Published
from planner.rungs import Ladders, Rungs, with_early_stop
from planner.signature import LAST_RESORT, POLICIES
from planner.specs import JobSpec, ModelShape, check_jobs
from planner.time import CostModel, cost_models

FEW_CLASSES = 60
DTM_JOBS, DTM_DEVICES = 200, 16  # the published method is run as a baseline up to here


@dataclass(frozen=True)
class Options:
    """Set what a plan may use and how long it is searched.

    `max_slots` bounds J, `policies` the recompute policies; the default ones are joined by "offload" where some job
    fits no GPU by them. `effort` counts tries; None takes what a few seconds allow for the size. `wall_s` ends the
    search early, as a safety: such a plan says `truncated` and may differ between machines. `early_stop` names the
    rungs of every job: the plan then tells its expected end, simulated, and is made rung by rung where that is
    expected to end earlier, or where `by_rung` says so.

    Raises:
        PlanError: a policy that is not known, or none.
    """

    max_slots: int = 256
    policies: tuple[str, ...] = POLICIES
    effort: Effort | None = None
    baselines: bool = True
    published: bool = True
    early_stop: Ladders | None = None
    by_rung: bool | None = None
    wall_s: float = 600.0

    def __post_init__(self) -> None:
        known = (*POLICIES, LAST_RESORT)
        if isinstance(self.policies, str) or not self.policies or not set(self.policies) <= set(known):
            raise PlanError(f"policies are {self.policies!r}; choose some of {', '.join(known)}")


def default_effort(instance: Instance) -> Effort:
    """Return how long to search: less for more jobs, and for many of many classes, whose dives take seconds each."""
    if instance.n_jobs < FEW * instance.usable and instance.n_jobs <= 200:
        return Effort(recuts=180, proposals=4_500, dives=12, restarts=4)
    if instance.n_jobs <= 200:
        return Effort(recuts=18, proposals=1_200, dives=4, orders=3, races=2)
    if instance.n_jobs <= 2_500:
        return Effort(recuts=60, proposals=4_000, dives=4)
    if len(instance.classes) <= FEW_CLASSES:
        return Effort(recuts=20, proposals=0, dives=2)
    return Effort(recuts=3, proposals=0, dives=1, orders=2, races=1)


def make_plan(
    jobs: Sequence[JobSpec],
    shape: ModelShape,
    devices: Devices | Mixture,
    *,
    precision: str = "bf16",
    cost_model: CostModel | Mapping[str, CostModel] | None = None,
    options: Options | None = None,
    incumbent: Sequence[Pack] | None = None,
    busy_until: Sequence[float] = (),
) -> Plan:
    """Plan the jobs on the devices for the least makespan; the best of all methods is returned.

    A mixture is planned as a whole, and no slower than on the devices of any of its types alone. `cost_model` is the
    devices', or a model for some of the types by name; shipped tables serve the others. `incumbent` is the packs of an
    earlier plan, for other jobs or devices perhaps: the new one is never slower than that plan repaired. `busy_until`
    says in how many seconds each device is free, where packs run; makespan and bound count from now, and baselines are
    left out.

    Raises:
        PlanError: no jobs, ids that clash, absurd values, or a base that no device group holds.
    """
    options = options or Options()
    kept, notes = check_jobs(list(jobs), shape)
    costs = cost_models(devices, cost_model)
    busy = tuple(busy_until) if any(busy_until) else ()
    if busy and len(busy) != devices.count:
        raise PlanError(f"busy_until has {len(busy)} numbers for {devices.count} devices; give one each")

    def instances_with(policies: tuple[str, ...]) -> list[Instance]:
        out: list[Instance] = []
        for part, cost in zip(devices.parts, costs.values(), strict=True):
            first = sum(one.devices.count for one in out)
            own = busy[first : first + part.count] if any(busy[first : first + part.count]) else ()
            limits, several = (options.max_slots, policies), len(costs) > 1
            out.append(Instance(kept, shape, part, precision, cost, *limits, own, several, first))
        return out

    policies, instances = options.policies, instances_with(options.policies)
    on_host = set(policies) == set(POLICIES) and all(part.spec.name != "cpu" for part in devices.parts)
    if on_host and not _hold_all(instances) and _hold_all(moved := instances_with((*policies, LAST_RESORT))):
        policies, instances = (*policies, LAST_RESORT), moved
        notes.append(
            "offload: a job fits only with layer inputs in the host's memory; --explain tells how much of it they take"
        )
    able = [instance for instance in instances if instance.degrees]
    if able and len(able) < len(instances):
        idle = " and ".join(str(instance.devices) for instance in instances if not instance.degrees)
        notes.append(f"{idle} hold none of the jobs and stay idle")
    if len(instances) == 1:
        found = _alone(instances[0], options, incumbent)
    else:
        found = _mixed(able or instances, options, incumbent)
    plan = build_plan(
        found.instances,
        found.placed,
        devices,
        found.bound,
        found.method,
        planning_s=found.planning_s,
        baselines_s=found.baselines_s,
        truncated=found.truncated,
        baselines=found.seconds,
        reasons=found.reasons,
        notes=tuple(notes),
        busy_until=busy,
    )
    if options.early_stop is None:
        return plan
    specs = {job.job_id: job for job in kept}
    rungs = Rungs(specs, shape, devices, precision, costs, options.early_stop, options.max_slots, policies)
    effort = options.effort or default_effort(instances[0])
    return with_early_stop(plan, rungs, effort, False if busy else options.by_rung)


def _hold_all(instances: Sequence[Instance]) -> bool:
    return all(any(one.fits(k) for one in instances) for k in range(len(instances[0].classes)))


class _Found(NamedTuple):
    """Hold the packs placed on the devices of each instance, and how they were found."""

    instances: list[Instance]
    placed: list[list[Placed]]
    bound: Bound
    method: str
    truncated: bool
    planning_s: float
    seconds: dict[str, float | None]
    reasons: dict[str, str]
    baselines_s: float

    @property
    def makespan_s(self) -> float:
        return max(item.end_s for own in self.placed for item in own)


def _alone(instance: Instance, options: Options, incumbent: Sequence[Pack] | None = None) -> _Found:
    """Plan on devices of one type."""
    started = time.perf_counter()
    bound = bounds(instance)
    start = repair(instance, incumbent) if incumbent else None
    deadline = started + options.wall_s
    effort = options.effort or default_effort(instance)
    solution, method, truncated = ours(instance, bound, effort, start, deadline)
    placed = place(instance, solution)
    planned = time.perf_counter()
    seconds: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    if options.baselines and not instance.busy:
        seconds = {"min_gpu_s": min_gpu_s([instance]), "max_gpu_s": max_gpu_s([instance])}
        best_s = makespan(solution)
        for name, other in (("greedy", first_fit(instance)), ("sequential", sequential(instance))):
            seconds[f"{name}_s"] = makespan(other) if other else None
            if other and makespan(other) < best_s:
                placed, method, best_s = place(instance, other), name, makespan(other)
        published, why = _published(instance, options)
        seconds["dtm_s"] = published[0] if published else None
        if why:
            reasons["dtm_s"] = why
        if published and published[0] < best_s:
            placed, method = published[1], "published"
    spent = planned - started, time.perf_counter() - planned
    return _Found([instance], [placed], bound, method, truncated, spent[0], seconds, reasons, spent[1])


def _published(instance: Instance, options: Options) -> tuple[tuple[float, list[Placed]] | None, str]:
    """Return the published method's makespan and packs on our step, or why there are none."""
    if instance.n_jobs > DTM_JOBS or instance.devices.count > DTM_DEVICES:
        return None, f"not run above {DTM_JOBS} jobs or {DTM_DEVICES} devices"
    if not options.published:
        return None, "not asked for"
    found = Published(instance).placed()
    return found, "" if found else "the published method found no packs that fit"


def _mixed(instances: list[Instance], options: Options, incumbent: Sequence[Pack] | None = None) -> _Found:
    """Plan on devices of several types; the best of their mixture and each type alone is returned."""
    started = time.perf_counter()
    check_fits(instances)
    types = [make_types(instance) for instance in instances]
    bound = mixed_bound(instances, types)
    start = repair_mixed(instances, incumbent) if incumbent else None
    effort = lambda own: options.effort or default_effort(own)  # noqa: E731
    solutions, method, truncated = mixed(instances, types, bound, effort, start, started + options.wall_s)
    placed = [place(one, solution) for one, solution in zip(instances, solutions, strict=True)]
    planned = time.perf_counter()
    seconds: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    if options.baselines and not any(one.busy for one in instances):
        seconds = {"min_gpu_s": min_gpu_s(instances), "max_gpu_s": max_gpu_s(instances), "dtm_s": None}
        reasons["dtm_s"] = "the published method is for devices of one type"
        dealt = dealt_singly(instances)
        for name, way in (("greedy", first_fit), ("sequential", sequential)):
            others = [
                on_type(one, any_of(one, counts), way) for one, counts in zip(instances, dealt, strict=True)
            ]
            seconds[f"{name}_s"] = mixed_makespan(others)
            if mixed_makespan(others) < mixed_makespan(solutions):
                solutions, method = others, name
                placed = [place(one, own) for one, own in zip(instances, others, strict=True)]
    spent = planned - started, time.perf_counter() - planned
    best = _Found(instances, placed, bound, method, truncated, spent[0], seconds, reasons, spent[1])
    for n, instance in enumerate(instances):
        whole = all(instance.fits(k) for k, _ in instance.counts)
        if not whole or bounds(instance).seconds >= best.makespan_s * (1 - 1e-9):
            continue
        alone = _alone(instance, options)
        if alone.makespan_s < best.makespan_s:
            placed = [alone.placed[0] if m == n else [] for m in range(len(instances))]
            best = best._replace(placed=placed, method=f"{instance.devices.spec.name} alone, {alone.method}")
    return best._replace(planning_s=time.perf_counter() - started - spent[1])
