"""Plan again: what nobody has begun, once micro-steps take longer, or less long, than the plan said; and at rungs.

Only the driver plans again for the pace, and never where decisions must not depend on time (`--reproducible`). At a
rung a worker that has nothing else to do plans the jobs that wait there. New packs are a line of the journal like any
other decision: workers find them there, and a run that goes on has the same list.
"""

import math
import statistics
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console

import planner
from plora_jax.config.sweep import Sweep
from plora_jax.data.layout import total_steps
from plora_jax.engine.journal import BASE, TEST, Journal, RunState
from plora_jax.engine.progress import clock, say
from plora_jax.engine.rundir import RunDirectory
from plora_jax.engine.task import Task
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.models.config import ModelConfig
from plora_jax.planning import plan_jobs

DRIFT = 0.1  # departure of step times from the plan that is worth another plan

# Plans jobs (by job_id) for a device that is so many times slower than the cost model; None where it cannot. The last
# arguments are the packs they are in now, and the seconds until each worker is free.
Solve = Callable[[Sequence[str], float, Sequence[planner.Pack], Sequence[float]], planner.Plan | None]


class Seen(NamedTuple):
    """Say how far a worker is in a pack, and by what factor its micro-steps take longer than that pack's plan says."""

    pack: str
    micro_step: int
    pace: float


class Replan(NamedTuple):
    """Hold the packs that take the place of others, how much slower than the cost model the device is, and the ends.

    `replaces` names the others, with the jobs that waited in each when this was decided. The ends are seconds from now:
    as it was planned, of the old packs at the measured pace, of the new ones at it.
    """

    replaces: dict[str, list[str]]
    packs: list[dict[str, Any]]
    scale: float
    planned_s: float
    kept_s: float
    left_s: float


def open_packs(state: RunState) -> dict[str, list[str]]:
    """Return the packs that no worker has begun, by name: their jobs that no pack has placed.

    A pack whose program had to be made smaller has been begun. Packs of places for jobs to be drawn are left out.
    """
    begun = state.claims.keys() | state.limits.keys() | state.done | {pack for pack, *_ in state.places}
    return {
        name: state.waiting(name)
        for name, pack in state.packs.items()
        if name not in begun and "corners" not in pack
    }


def measured(state: RunState, seen: Iterable[Seen]) -> float | None:
    """Return by what factor steps take longer than the cost model says, by the median worker; None if none tells."""
    factors = [one.pace * state.scale.get(one.pack, 1.0) for one in seen if one.pack in state.packs]
    return statistics.median(factors) if factors else None


def drifted(state: RunState, names: Iterable[str], factor: float) -> bool:
    """Tell whether some of these packs were planned for a device more than DRIFT slower or faster than `factor`."""
    return any(abs(factor / state.scale.get(name, 1.0) - 1) > DRIFT for name in names)


def replan(state: RunState, seen: Sequence[Seen], solve: Solve) -> Replan | None:
    """Decide what takes the place of the packs that nobody has begun; None when they may stay.

    They stay when they were planned for the pace that is measured, and when no plan ends earlier at it.
    """
    factor, waiting = measured(state, seen), open_packs(state)
    jobs = [job_id for ids in waiting.values() for job_id in ids]
    if factor is None or not jobs or not drifted(state, waiting, factor):
        return None
    old = {name: planner.Pack.from_dict(state.packs[name]) for name in waiting}
    running, count = _running(state, seen), planner.devices_from(state.settings["devices"]).count
    free = sorted([*running, *[0.0] * (count - len(running))])[:count]
    plan = solve(jobs, factor, list(old.values()), free)
    if plan is None:
        return None
    then = [_seconds(pack, waiting[name], 1.0) for name, pack in old.items()]
    kept = [_seconds(pack, waiting[name], factor / state.scale.get(name, 1.0)) for name, pack in old.items()]
    now = [_seconds(pack, pack.jobs, 1.0) for pack in sorted(plan.packs, key=lambda pack: pack.start_s)]
    planned_s = _end(_running(state, [one._replace(pace=1.0) for one in seen]), then, count)
    kept_s, left_s = _end(running, kept, count), _end(running, now, count)
    if left_s > kept_s:
        return None
    return Replan(waiting, plan.to_dict()["packs"], factor, planned_s, kept_s, left_s)


def plan_left(
    journal: Journal,
    sweep: Sweep,
    config: ModelConfig,
    task: Task,
    names: Sequence[str],
    scale: float,
    *,
    rung: int | None,
    packs: Sequence[planner.Pack] = (),
    busy_until: Sequence[float] = (),
) -> planner.Plan | None:
    """Plan jobs for workers that have the base loaded: whole, or to their next rungs in packs of rung number `rung`.

    None where their data is not at hand. `packs` are those they are in now, `scale` is how much slower than the cost
    model the device is, `busy_until` the seconds until each worker is free.

    Raises:
      UserError: no plan is possible.
    """
    jobs = [Job.from_dict(journal.state.jobs[name]) for name in names]
    files = {job.job_id: job.train or sweep.data.train for job in jobs}
    if not task.files.keys() >= set(files.values()):  # jobs on other data were added
        return None
    train = {name: task.files[file] for name, file in files.items()}
    begun, paused = None, journal.state.paused
    if rung is not None:
        begun = {
            job.job_id: paused[job.job_id]["step"] / total_steps(job, len(train[job.job_id]))
            for job in jobs
            if job.job_id in paused
        }
    devices = journal.devices
    assert isinstance(devices, planner.Devices)  # a mixture is neither planned rung by rung nor for its pace
    slowed = planner.cost_model(devices.spec).slowed(scale)
    return plan_jobs(
        sweep,
        config,
        jobs,
        train,
        dict.fromkeys(files, task.eval.tokens),
        devices,
        cost_model=replace(slowed, load_s=0.0, load_bytes_s=math.inf),  # the base is resident
        incumbent=packs,
        busy_until=busy_until,
        begun=begun,
        rung=rung or 0,
    )


def _running(state: RunState, seen: Iterable[Seen]) -> list[float]:
    """Return the seconds that the packs in training still need."""
    packs = [(state.packs[one.pack], one) for one in seen if one.pack in state.packs]
    return [max(pack["steps"] - one.micro_step, 0) * pack["step_s"] * one.pace for pack, one in packs]


def _seconds(pack: planner.Pack, jobs: Collection[str], factor: float) -> float:
    """Return what a pack takes for some of its jobs, whose slots run side by side."""
    slots: dict[int, float] = defaultdict(float)
    for place in pack.assign:
        if place.job_id in jobs:
            slots[place.slot] += factor * (place.end_s - place.start_s)
    return pack.setup_s + max(slots.values()) if slots else 0.0


def _end(running: Sequence[float], packs: Iterable[float], workers: int) -> float:
    """Return when all is done by workers that take one pack after another, as soon as they are free."""
    free = sorted([*running, *[0.0] * (workers - len(running))])
    for seconds in packs:
        free = sorted([free[0] + seconds, *free[1:]])
    return free[-1]


class Replanner:
    """Watch the pace of the workers, and journal another plan when it has left the plan's; once for each pack done.

    Where decisions must not depend on time, or devices are of several types, a drift is told of in events.jsonl, and
    nothing else.
    """

    def __init__(
        self,
        run: RunDirectory,
        journal: Journal,
        sweep: Sweep,
        config: ModelConfig,
        task: Task,
        console: Console,
    ) -> None:
        self.run, self.journal, self.sweep, self.config = run, journal, sweep, config
        self.task, self.console = task, console
        self._seen_at = -1  # packs that were done at the last drift

    def look(self, workers: Iterable[Mapping[str, Any]]) -> None:
        """Act on what workers say of themselves: their `pack`, `micro_step` and `pace`."""
        state = self.journal.refresh()
        seen = [Seen(w["pack"], w["micro_step"], w["pace"]) for w in workers if w.get("pace")]
        seen = [one for one in seen if one.pack not in state.done]
        factor, done = measured(state, seen), len(state.done - {BASE, TEST})
        names = open_packs(state) or {one.pack for one in seen}
        if factor is None or done <= self._seen_at or not drifted(state, names, factor):
            return
        self._seen_at = done
        told_only = state.settings["reproducible"] or isinstance(self.journal.devices, planner.Mixture)
        found = None if told_only else replan(state, seen, self._solve)
        if found is None:
            self.run.event("drift", factor=round(factor, 3))
        elif not self._adopt(found):
            self._seen_at -= 1  # a worker was faster: look again

    def _solve(
        self,
        names: Sequence[str],
        scale: float,
        packs: Sequence[planner.Pack],
        busy_until: Sequence[float],
    ) -> planner.Plan | None:
        rungs = {pack.rung for pack in packs}
        if len(rungs) > 1:  # some train whole jobs, or jobs were added meanwhile
            return None
        try:
            return plan_left(
                self.journal,
                self.sweep,
                self.config,
                self.task,
                names,
                scale,
                rung=rungs.pop(),
                packs=packs,
                busy_until=busy_until,
            )
        except UserError:
            return None
        except Exception as error:  # for which no sweep ends
            self.run.event("error", cause=f"planning again: {error}", trace=traceback.format_exc())
            return None

    def _adopt(self, found: Replan) -> bool:
        """Journal the new packs, unless a worker has begun one of the old ones, or taken a job, in the meantime."""
        with self.journal.locked() as state:
            if open_packs(state) != found.replaces:
                return False
            self.journal.add_plan({}, found.packs, replaces=list(found.replaces), scale=found.scale)
        ends = {"planned_s": found.planned_s, "kept_s": found.kept_s, "left_s": found.left_s}
        told = {name: round(seconds, 1) for name, seconds in ends.items()}
        told["factor"] = round(found.scale, 3)
        self.run.event("replanned", **told, replaces=list(found.replaces), packs=len(found.packs))
        say(
            self.console,
            f"micro-steps take {found.scale:.2f} times as long as by the cost model; what nobody has begun is planned "
            f"again: {clock(found.left_s)} left, and not {clock(found.planned_s)} as planned",
        )
        return True
