"""`make_plan`: from jobs, a model and devices to the best plan of all methods, with its bound."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from planner.baselines import baselines
from planner.build import build_plan
from planner.devices import Devices
from planner.groups import makespan
from planner.incumbent import repair
from planner.instance import Instance
from planner.ours import FEW, Effort, bounds, ours
from planner.placed import Placed, place
from planner.plan import Pack, Plan
from planner.published import Published
from planner.rungs import Ladders, Rungs, with_early_stop
from planner.signature import POLICIES
from planner.specs import JobSpec, ModelShape, check_jobs
from planner.time import CostModel
from planner.time import cost_model as shipped_cost_model

FEW_CLASSES = 60
DTM_JOBS, DTM_DEVICES = 200, 16  # the published method is run as a baseline up to here


@dataclass(frozen=True)
class Options:
    """Set what a plan may use and how long it is searched.

    `max_slots` bounds J, `policies` the recompute policies. `effort` counts tries; None takes what a few
    seconds allow for the size. `wall_s` ends the search early, as a safety: such a plan says `truncated` and
    may differ between machines. `early_stop` names the rungs of every job: the plan then tells its expected end,
    simulated, and is made rung by rung where that is expected to end earlier, or where `by_rung` says so.
    """

    max_slots: int = 256
    policies: tuple[str, ...] = POLICIES
    effort: Effort | None = None
    baselines: bool = True
    published: bool = True
    early_stop: Ladders | None = None
    by_rung: bool | None = None
    wall_s: float = 600.0


def default_effort(instance: Instance) -> Effort:
    """Return how long to search: less for more jobs; among many, dives pay only where jobs are of few classes."""
    if instance.n_jobs < FEW * instance.usable and instance.n_jobs <= 200:
        return Effort(recuts=180, proposals=4_500, dives=12, restarts=2)
    if instance.n_jobs <= 200:
        return Effort()
    if instance.n_jobs <= 2_500:
        return Effort(recuts=60, proposals=4_000, dives=4)
    few = len(instance.classes) <= FEW_CLASSES
    return Effort(recuts=20 if few else 3, proposals=0, dives=2 if few else 0)


def make_plan(
    jobs: Sequence[JobSpec],
    shape: ModelShape,
    devices: Devices,
    *,
    precision: str = "bf16",
    cost_model: CostModel | None = None,
    options: Options | None = None,
    incumbent: Sequence[Pack] | None = None,
    busy_until: Sequence[float] = (),
) -> Plan:
    """Plan the jobs on the devices for the least makespan; the best of all methods is returned.

    `incumbent` is the packs of an earlier plan, for other jobs or devices perhaps: the new one is never slower than
    that plan repaired. `busy_until` says in how many seconds each device is free, where packs run; makespan and bound
    count from now, and baselines are left out.

    Raises:
        PlanError: no jobs, ids that clash, absurd values, or a base that no device group holds.
    """
    options = options or Options()
    kept, notes = check_jobs(list(jobs), shape)
    cost = cost_model or shipped_cost_model(devices.spec)
    busy = tuple(busy_until) if any(busy_until) else ()
    instance = Instance(kept, shape, devices, precision, cost, options.max_slots, options.policies, busy)
    started = time.perf_counter()
    bound = bounds(instance)
    start = repair(instance, incumbent) if incumbent else None
    deadline = started + options.wall_s
    effort = options.effort or default_effort(instance)
    solution, method, truncated = ours(instance, bound, effort, start, deadline)
    placed = place(instance, solution)
    planning_s = time.perf_counter() - started
    started = time.perf_counter()
    seconds: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    if options.baselines and not busy:
        seconds, placed, method = _with_baselines(instance, placed, method, options, reasons)
    plan = build_plan(
        instance,
        placed,
        bound,
        method,
        planning_s=planning_s,
        baselines_s=time.perf_counter() - started,
        truncated=truncated,
        baselines=seconds,
        reasons=reasons,
        notes=tuple(notes),
        busy_until=busy,
    )
    if options.early_stop is None:
        return plan
    specs = {job.job_id: job for job in kept}
    ladders, slots, policies = options.early_stop, options.max_slots, options.policies
    rungs = Rungs(specs, shape, devices, precision, cost, ladders, slots, policies)
    return with_early_stop(plan, rungs, effort, False if busy else options.by_rung)


def _with_baselines(
    instance: Instance, placed: list[Placed], method: str, options: Options, reasons: dict[str, str]
) -> tuple[dict[str, float | None], list[Placed], str]:
    """Return every baseline's seconds, and the best placed packs of ours and all of them."""
    seconds, solutions = baselines(instance)
    best_s = max(item.end_s for item in placed)
    for name, solution in sorted(solutions.items()):
        if makespan(solution) < best_s:
            placed, method, best_s = place(instance, solution), name, makespan(solution)
    if instance.n_jobs > DTM_JOBS or instance.devices.count > DTM_DEVICES:
        seconds["dtm_s"] = None
        reasons["dtm_s"] = f"not run above {DTM_JOBS} jobs or {DTM_DEVICES} devices"
    elif not options.published:
        seconds["dtm_s"] = None
        reasons["dtm_s"] = "not asked for"
    else:
        found = Published(instance).placed()
        seconds["dtm_s"] = found[0] if found else None
        if found is None:
            reasons["dtm_s"] = "the published method found no packs that fit"
        elif found[0] < best_s:
            placed, method = found[1], "published"
    return seconds, placed, method
