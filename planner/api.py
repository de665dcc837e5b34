"""`make_plan`: from jobs, a model and devices to the best plan of all methods, with its bound."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from planner.bound import lower_bound
from planner.build import build_plan
from planner.devices import Devices
from planner.greedy import greedy
from planner.instance import Instance
from planner.plan import Plan
from planner.signature import POLICIES
from planner.specs import JobSpec, ModelShape, check_jobs
from planner.time import CostModel, cost_model


@dataclass(frozen=True)
class Options:
    """Set what a plan may use: `max_slots` bounds J, `policies` the recompute policies."""

    max_slots: int = 256
    policies: tuple[str, ...] = POLICIES


def make_plan(
    jobs: Sequence[JobSpec],
    shape: ModelShape,
    devices: Devices,
    *,
    precision: str = "bf16",
    cost_model: CostModel | None = None,
    options: Options | None = None,
) -> Plan:
    """Plan the jobs on the devices for the least makespan.

    Raises:
        PlanError: no jobs, ids that clash, absurd values, or a base that no device group holds.
    """
    options = options or Options()
    kept, notes = check_jobs(list(jobs), shape)
    cost = cost_model or shipped(devices)
    instance = Instance(kept, shape, devices, precision, cost, options.max_slots, options.policies)
    started = time.perf_counter()
    bound, kind = lower_bound(instance)
    solution = greedy(instance, bound)
    seconds = time.perf_counter() - started
    return build_plan(instance, solution, bound, kind, "greedy", planning_s=seconds, notes=tuple(notes))


def shipped(devices: Devices) -> CostModel:
    """Return the shipped cost model of a device type."""
    return cost_model(devices.spec)
