"""A second opinion on a plan: every number recomputed from the jobs, by code that shares nothing with the
planner.

Only data classes (jobs, shape, plan, cost model) are read. Formulas are written out anew in plain loops; the
configuration LP is built as text-book constraints in cvxpy and solved at the claimed bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from planner.check_bound import Part, can_finish, needs_host
from planner.check_models import MOMENTS, coefficients, pack_bytes, union
from planner.devices import Devices, Mixture
from planner.plan import Pack, Plan
from planner.several import Problem, SeveralPlan
from planner.specs import JobSpec, ModelShape
from planner.time import CostModel, cost_models

TOLERANCE = 1e-6


def check_plan(
    plan: Plan,
    jobs: list[JobSpec],
    shape: ModelShape,
    devices: Devices | Mixture,
    cost: CostModel | Mapping[str, CostModel],
    *,
    bound: bool = True,
) -> list[str]:
    """Return what is wrong with a plan, one sentence each; an empty list when nothing is.

    Checks: every job once; slots and devices never double-booked; each job fits its pack's program; step
    time, micro-steps, spans and makespan; memory against prediction and limit; with `bound`, that no plan
    could finish 0.2 % sooner than the claimed lower bound by the argument that the plan names. Of a mixture,
    `cost` holds a model for every type by its name, and each pack must be on devices of the type that it says. A
    pack by "offload" is a fault where every job fits without, also if the caller chose that policy.
    """
    parts = [(part, cost if isinstance(cost, CostModel) else cost[part.spec.name]) for part in devices.parts]
    on = {device: n for n, device_part in enumerate(_numbers(devices)) for device in device_part}
    whole = {job.job_id: job for job in jobs}
    by_rung = {rung: _at_rung(plan, whole, shape, rung) for rung in {pack.rung for pack in plan.packs}}
    faults = [fault for rung in by_rung for fault in _once(plan, rung, by_rung[rung])]
    faults += _devices(plan, devices) + _order(plan)
    if any(device not in on for pack in plan.packs for device in pack.devices):
        return faults  # which say so
    for n, pack in enumerate(plan.packs):
        spec = by_rung[pack.rung]
        here = [spec[job_id] for job_id in pack.jobs if job_id in spec]
        part, own = parts[on[pack.devices[0]]]
        faults += [f"pack {n}: {fault}" for fault in _program(pack, here)]
        faults += [f"pack {n}: {fault}" for fault in _times(pack, spec, shape, plan.precision, own)]
        faults += [f"pack {n}: {fault}" for fault in _memory(pack, here, shape, plan, part, own)]
    away = any(pack.policy == "offload" for pack in plan.packs)
    if away and not needs_host(jobs, plan.precision, shape, parts):
        faults.append("layer inputs go to the host's memory although every job fits without")
    last = max((a.end_s for pack in plan.packs for a in pack.assign), default=0.0)
    if not math.isclose(last, plan.makespan_s, rel_tol=TOLERANCE):
        faults.append(f"the last job ends at {last}, the plan says {plan.makespan_s}")
    staged = plan.packs and plan.packs[0].rung is not None  # the bound is one on plans of whole jobs
    if not staged and plan.lower_bound_s > plan.makespan_s * (1 + TOLERANCE):
        faults.append(f"the lower bound {plan.lower_bound_s} is above the makespan {plan.makespan_s}")
    if bound and not faults:
        faults += _bound(plan, jobs, shape, parts)
    return faults


def _numbers(devices: Devices | Mixture) -> list[range]:
    """Return the numbers of the devices of each type."""
    ends = list(accumulate(part.count for part in devices.parts))
    return [range(end - part.count, end) for end, part in zip(ends, devices.parts, strict=True)]


def _at_rung(
    plan: Plan, whole: dict[str, JobSpec], shape: ModelShape, rung: int | None
) -> dict[str, JobSpec]:
    """Return the jobs as they are at a rung: the rows to the next one, and the state that is read and written."""
    if rung is None:
        return whole
    spec = {}
    for job_id, job in whole.items():
        steps = math.ceil(job.rows / job.batch_size)
        ends = {math.ceil(share * steps - 1e-9) for share in plan.jobs[job_id]["rungs"]} | {steps}
        borders = [0, *sorted(end for end in ends if end > 0)]
        if rung + 1 < len(borders):
            first, last = (min(job.rows, step * job.batch_size) for step in borders[rung : rung + 2])
            moments = MOMENTS[job.optimizer]
            params = shape.n_layers * job.rank
            params *= sum(i + o for name, i, o in shape.sites if job.targets is None or name in job.targets)
            moves = (rung > 0) + (rung + 2 < len(borders))
            spec[job_id] = replace(
                job,
                rows=last - first,
                data=f"{job.data} from row {first}" if first else job.data,
                eval_tokens=job.eval_tokens // (1 + len(plan.jobs[job_id]["rungs"])),
                state_bytes=(4 + moments) * params * moves,
            )
    return spec


def _once(plan: Plan, rung: int | None, spec: dict[str, JobSpec]) -> list[str]:
    given = [a.job_id for pack in plan.packs if pack.rung == rung for a in pack.assign]
    where = "" if rung is None else f" at rung {rung}"
    faults = [
        f"job {job} is planned {given.count(job)} times{where}" for job in spec if given.count(job) != 1
    ]
    return faults + [f"job {job} was never asked for{where}" for job in set(given) - set(spec)]


def _order(plan: Plan) -> list[str]:
    faults = []
    for n, pack in enumerate(plan.packs):
        before = [one.end_s for one in plan.packs if (one.rung or 0) < (pack.rung or 0)]
        if before and pack.start_s < max(before) * (1 - TOLERANCE):
            faults.append(f"pack {n} begins before the rung ahead of it has ended")
    return faults


def _overlap(spans: list[tuple[float, float]]) -> bool:
    spans = sorted(spans)
    return any(b[0] < a[1] - TOLERANCE * max(1.0, a[1]) for a, b in pairwise(spans))


def _devices(plan: Plan, devices: Devices | Mixture) -> list[str]:
    faults = []
    numbers = _numbers(devices)
    for device in range(devices.count):
        if _overlap([(pack.start_s, pack.end_s) for pack in plan.packs if device in pack.devices]):
            faults.append(f"device {device} runs two packs at one time")
    for n, pack in enumerate(plan.packs):
        if any(
            pack.start_s < plan.busy_until[device] - TOLERANCE for device in pack.devices if plan.busy_until
        ):
            faults.append(f"pack {n} starts before its devices are free")
        if len(set(pack.devices)) != pack.degree or not set(pack.devices) <= set(range(devices.count)):
            faults.append(f"pack {n} of degree {pack.degree} is on devices {pack.devices}")
        for part, own in zip(devices.parts, numbers, strict=True):
            inside = [device - own.start for device in pack.devices if device in own]
            if 0 < len(inside) < len(pack.devices):
                faults.append(f"pack {n} is on devices of more types than {part.spec.name}")
            if inside and pack.device != part.spec.name:
                faults.append(f"pack {n} says {pack.device}, its devices are {part.spec.name}")
            node = part.spec.node_size
            if len({device // node for device in inside}) > 1:
                faults.append(f"pack {n} straddles hosts of {node} devices")
        for slot in range(len(pack.slots)):
            if _overlap([(a.start_s, a.end_s) for a in pack.assign if a.slot == slot]):
                faults.append(f"pack {n} slot {slot} holds two jobs at one time")
        if any(not 0 <= a.slot < len(pack.slots) for a in pack.assign):
            faults.append(f"pack {n} uses a slot it does not have")
    return faults


def _program(pack: Pack, jobs: list[JobSpec]) -> list[str]:
    faults = []
    for job in jobs:
        if job.batch_size % pack.m:
            faults.append(f"m {pack.m} does not divide batch size {job.batch_size} of {job.job_id}")
        if job.rank > min(pack.slots):
            faults.append(f"rank {job.rank} of {job.job_id} exceeds the slot's {min(pack.slots)}")
        if job.max_row_tokens > max(pack.length_buckets):
            faults.append(f"rows of {job.job_id} are longer than {max(pack.length_buckets)}")
    return faults


def _times(
    pack: Pack, spec: dict[str, JobSpec], shape: ModelShape, precision: str, cost: CostModel
) -> list[str]:
    faults = []
    here = [spec[job_id] for job_id in pack.jobs if job_id in spec]
    S = max(job.row_tokens for job in here) * (1 + cost.padding)
    if len({job.data for job in here}) > 1:
        longest = max(-(-job.max_row_tokens // 8) * 8 for job in here)
        S = max(S, min(S * (1 + cost.mixed_padding), longest))
    t0, token, rank_s, rank_token_s = coefficients(
        shape, cost, pack.degree, pack.policy, precision, S, union(here)
    )
    step = t0
    for bucket in pack.slots:
        step += token * pack.m * S + bucket * (rank_s + rank_token_s * pack.m * S)
    if not math.isclose(step, pack.step_s, rel_tol=TOLERANCE):
        faults.append(f"a step takes {step} s, the plan says {pack.step_s}")
    longest_slot = 0
    for slot in range(len(pack.slots)):
        held = [spec[a.job_id] for a in pack.assign if a.slot == slot and a.job_id in spec]
        longest_slot = max(longest_slot, sum(math.ceil(job.rows / pack.m) for job in held))
    if longest_slot != pack.steps:
        faults.append(f"its fullest slot needs {longest_slot} steps, the plan says {pack.steps}")
    scoring = 0.0
    for job in here:
        _, c, _, _ = coefficients(shape, cost, pack.degree, "none", precision, job.row_tokens, job.targets)
        scoring += cost.export_s + c * job.eval_tokens / 2 + job.state_bytes / cost.state_bytes_s
    end = pack.start_s + pack.setup_s + longest_slot * step + scoring
    if not math.isclose(end, pack.end_s, rel_tol=TOLERANCE):
        faults.append(f"it ends at {end} s, the plan says {pack.end_s}")
    if any(
        a.start_s < pack.start_s + pack.setup_s - TOLERANCE or a.end_s > end * (1 + TOLERANCE)
        for a in pack.assign
    ):
        faults.append("a job lies outside its pack's time")
    for a in pack.assign:
        own = math.ceil(spec[a.job_id].rows / pack.m) * step if a.job_id in spec else 0.0
        if a.end_s - a.start_s < own * (1 - TOLERANCE):
            faults.append(f"job {a.job_id} has {a.end_s - a.start_s} s for {own} s of steps")
    return faults


def _memory(
    pack: Pack, jobs: list[JobSpec], shape: ModelShape, plan: Plan, devices: Devices, cost: CostModel
) -> list[str]:
    moments = sum(MOMENTS[kind] for kind in {job.optimizer for job in jobs})
    longest = max(pack.length_buckets)
    total = pack_bytes(
        shape,
        cost,
        devices,
        plan.precision,
        pack.degree,
        pack.slots,
        pack.m,
        longest,
        pack.policy,
        moments,
        union(jobs),
        any(job.accumulate or job.batch_size != pack.m for job in jobs),
    )
    faults = []
    if not math.isclose(total, pack.memory_bytes, rel_tol=1e-5):
        faults.append(f"it needs {total:.0f} bytes, the plan says {pack.memory_bytes}")
    if total > devices.spec.memory_bytes * devices.spec.usable * (1 + TOLERANCE):
        faults.append(f"it needs {total:.0f} bytes, more than a device may use")
    return faults


def _bound(plan: Plan, jobs: list[JobSpec], shape: ModelShape, parts: list[Part]) -> list[str]:
    sooner = plan.lower_bound_s * (1 - 2e-3)
    if can_finish(plan, jobs, shape, parts, sooner):
        return [f"the bound {plan.lower_bound_s} ({plan.bound}) does not hold: {sooner} is not ruled out"]
    return []


def check_several(
    plan: SeveralPlan, problems: Sequence[Problem], devices: Devices, *, bound: bool = True
) -> list[str]:
    """Return what is wrong with a plan of several sweeps, one sentence each; an empty list when nothing is.

    Checks: every sweep's own plan; no device in two shares or beyond the last; no pack on two hosts; with `bound`, that
    no sweep ends 0.2 % before the bound on all on its `too_few` devices, and that no deal gives every sweep more.
    """
    if [share.name for share in plan.sweeps] != [problem.name for problem in problems]:
        return ["the sweeps are not those that were asked for"]
    taken = [device for share in plan.sweeps for device in share.devices]
    faults = [f"device {n} is in several shares" for n in sorted(set(taken)) if taken.count(n) > 1]
    faults += [f"device {n} is not on the machine" for n in taken if not 0 <= n < devices.count]
    for share, problem in zip(plan.sweeps, problems, strict=True):
        jobs, shape, own = list(problem.jobs), problem.shape, Devices(devices.spec, len(share.devices))
        (cost,) = cost_models(own, problem.cost_model).values()
        found = check_plan(share.plan, jobs, shape, own, cost, bound=bound)
        for n, pack in enumerate(share.plan.packs):
            on = [share.devices[device] for device in pack.devices if device < own.count]
            if len({device // devices.spec.node_size for device in on}) > 1:
                found.append(f"pack {n} straddles hosts of {devices.spec.node_size} devices")
        if bound and not found and share.too_few > 0:
            few = Devices(devices.spec, share.too_few)
            proof, sooner = replace(share.plan, prices=share.prices), plan.lower_bound_s * (1 - 2e-3)
            if can_finish(proof, jobs, shape, [(few, cost)], sooner, offloads=False):
                found.append(f"{few} are not shown to be too few to end within {sooner}")
        faults += [f"{share.name}: {fault}" for fault in found]
    if bound and sum(share.too_few + 1 for share in plan.sweeps) <= devices.count:
        faults.append("the bound does not hold: every sweep can get more devices than are too few")
    return faults
