"""Planning rung by rung: with early stopping, jobs wait at each rung, and those that go on are planned anew.

A job's stretch between two rungs is planned like a job of its own with fewer rows, so that whoever passes a rung may
go on in another pack, on other devices, beside fewer jobs. The packs of a rung all end before the next ones begin.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.build import all_packs
from planner.devices import Devices, Mixture
from planner.errors import PlanError
from planner.greedy import greedy
from planner.groups import Solution, makespan
from planner.instance import Instance
from planner.ours import Effort, bounds, ours
from planner.placed import place
from planner.plan import Pack, Plan
from planner.simulate import Ladder, World, ladder_stops, simulate, stretch
from planner.specs import MOMENT_BYTES, JobSpec, ModelShape
from planner.time import CostModel

FEW_JOBS, MANY_JOBS = 200, 2_500
DRAWS = (8, 3, 1)  # simulated runs of few, more and many jobs
Ladders = Callable[[JobSpec], Ladder]


def state_bytes(job: JobSpec, shape: ModelShape) -> int:
    """Return the size of what a job that waits leaves behind: float32 adapter and moments, at its true rank."""
    return (4 + MOMENT_BYTES[job.optimizer]) * shape.adapter_params(job.rank, job.targets)


def rest(job: JobSpec, ladder: Ladder, done: float, shape: ModelShape) -> JobSpec:
    """Return a job's stretch to its next rung, `done` of its training being over, with the state that it moves."""
    short, end = stretch(job, ladder, done)
    moved = state_bytes(job, shape) * ((done > 0) + (end < 1))
    return replace(short, state_bytes=moved)


@dataclass
class Rungs:
    """Hold a planning problem with early stopping; `packs_of` is the online policy, which simulations replay."""

    jobs: Mapping[str, JobSpec]
    shape: ModelShape
    devices: Devices | Mixture
    precision: str
    costs: Mapping[str, CostModel]  # by the name of the device type
    ladders: Ladders
    max_slots: int
    policies: tuple[str, ...]

    def packs_of(self, done: Mapping[str, float], rung: int, effort: Effort | None = None) -> list[Pack]:
        """Plan the jobs' next stretches, each from the share of its training that is done, as packs of rung `rung`.

        The base is resident after the first rung. Without `effort` the greedy alone is asked.
        """
        assert isinstance(self.devices, Devices)  # as with_early_stop sees to
        (whole_cost,) = self.costs.values()
        jobs = [
            rest(self.jobs[name], self.ladders(self.jobs[name]), at, self.shape) for name, at in done.items()
        ]
        cost = whole_cost if rung == 0 else replace(whole_cost, load_s=0.0, load_bytes_s=math.inf)
        instance = Instance(
            jobs, self.shape, self.devices, self.precision, cost, self.max_slots, self.policies
        )
        solution: Solution
        if effort is None:
            solution = min(greedy(instance, 0.0).values(), key=makespan)
        else:
            solution, _, _ = ours(instance, bounds(instance), effort)
        return [replace(pack, rung=rung) for pack in all_packs([instance], [place(instance, solution)])]

    def plan(self, whole: Plan, effort: Effort) -> Plan:
        """Return the plan in which every job passes every rung: what is begun first, and an upper bound on the rest."""
        done, packs, clock = dict.fromkeys(self.jobs, 0.0), [], 0.0
        rung = 0
        while done:
            made = self.packs_of(done, rung, effort if rung == 0 else None)
            packs += [shifted(pack, clock) for pack in made]
            clock += max(pack.end_s for pack in made)
            ends = {
                name: stretch(self.jobs[name], self.ladders(self.jobs[name]), at)[1]
                for name, at in done.items()
            }
            done = {name: end for name, end in ends.items() if end < 1}
            rung += 1
        fields = {
            name: {**job, "rungs": list(self.ladders(self.jobs[name]).rungs)}
            for name, job in whole.jobs.items()
        }
        return replace(whole, packs=tuple(packs), makespan_s=clock, method="rung by rung", jobs=fields)

    def expected(self, plan: Plan, draws: int, policy: Callable[..., Sequence[Pack]] | None = None) -> float:
        """Return the mean simulated end under early stopping: scored at rungs, slots refilled, packs made smaller."""
        world = World(
            stop=ladder_stops(self.ladders),
            ladders=self.ladders,
            smaller=self.step_seconds,
            compile_s=max(cost.compile_s for cost in self.costs.values()),
        )
        specs = dict(self.jobs)
        return sum(simulate(plan, specs, world, seed, policy).makespan_s for seed in range(draws)) / draws

    def step_seconds(self, pack: Pack, slots: int) -> float:
        """Return the time of a pack's step with fewer slots."""
        sites = [self.jobs[name].targets for name in pack.jobs]
        union = None if None in sites else frozenset().union(*(one for one in sites if one is not None))
        cost = self.costs[pack.device].step_cost(
            self.shape, pack.degree, pack.policy, self.precision, pack.row_tokens, union
        )
        return cost.seconds(slots, pack.m, pack.row_tokens, max(pack.slots))


def shifted(pack: Pack, by: float) -> Pack:
    """Return a pack that begins so many seconds later."""
    assign = tuple(replace(a, start_s=a.start_s + by, end_s=a.end_s + by) for a in pack.assign)
    return replace(pack, start_s=pack.start_s + by, end_s=pack.end_s + by, assign=assign)


def with_early_stop(plan: Plan, rungs: Rungs, effort: Effort, by_rung: bool | None) -> Plan:
    """Return the plan of whole jobs, or the one rung by rung where that is expected to end earlier, with its end.

    Both are simulated with the same stops. `by_rung` asks for one of them whatever is expected. On devices of several
    types jobs are planned whole.

    Raises:
        PlanError: `by_rung` asks for rungs on devices of several types.
    """
    if plan.is_mixed and by_rung:
        raise PlanError(
            f"rung by rung, jobs are planned on devices of one type alone, not on {plan.hardware}"
        )
    if plan.is_mixed:
        by_rung = False
        plan = replace(plan, notes=(*plan.notes, "on devices of several types, jobs are planned whole"))
    started, n = time.perf_counter(), len(rungs.jobs)
    draws = DRAWS[0] if n <= FEW_JOBS else DRAWS[1] if n <= MANY_JOBS else DRAWS[2]
    whole_s = rungs.expected(plan, draws)
    made = replace(plan, expected_s=whole_s)
    if by_rung is not False and any(rungs.ladders(job).rungs for job in rungs.jobs.values()):
        staged = rungs.plan(plan, effort)
        staged_s = rungs.expected(staged, draws, rungs.packs_of)
        if by_rung or staged_s < whole_s:
            whole = {"makespan_s": plan.makespan_s, "expected_s": whole_s}
            made = replace(staged, expected_s=staged_s, whole=whole)
    return replace(made, planning_s=plan.planning_s + time.perf_counter() - started)
