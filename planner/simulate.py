"""A discrete-event simulation of a plan's execution: noise, early stops, failures, late jobs, slot refill.

Without noise and events it replays the plan to its predicted makespan. Each device group runs its packs in
order; in a pack all slots take steps together, a job's end pauses the pack for scoring, and its slot takes
the next job. A plan rung by rung is replayed as it is run: once the packs of a rung have ended, those jobs that
pass are planned again (`replan`), or go on in the packs that the plan holds for them.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from planner.plan import Pack, Plan
from planner.signature import Signature, fits
from planner.specs import JobSpec

Stop = Callable[[JobSpec, random.Random], float]  # the share of its steps after which a job stops
# plans jobs, given with the share of their steps that is done, as the packs of a rung
Replan = Callable[[Mapping[str, float], int], Sequence[Pack]]
CLOSE = 1e-9  # a share this close to a rung has reached it
PAYS_AFTER = 200  # micro-steps that earn back what compiling the step for fewer slots costs


class Ladder(NamedTuple):
    """Name the rungs of a job, shares of its steps in (0, 1), rising, each passed by one job in `eta`."""

    eta: int = 3
    rungs: tuple[float, ...] = (1 / 9, 1 / 3)


def stretch(job: JobSpec, ladder: Ladder, done: float) -> tuple[JobSpec, float]:
    """Return what is left of a job to its next rung as a job, and the share of the whole at which that ends.

    The job is scored at every rung and at its end, equally long each time. A rung falls on the first optimizer step
    at or past it. Jobs that stand at other rows see rows of other lengths side by side, so they count as jobs on other
    data.
    """
    steps = -(-job.rows // job.batch_size)

    def step(share: float) -> int:
        return min(steps, max(1, math.ceil(share * steps - CLOSE)))

    begin = step(done) if done > 0 else 0
    end = next((at for at in map(step, ladder.rungs) if at > begin), steps)
    first, last = begin * job.batch_size, min(job.rows, end * job.batch_size)
    data = f"{job.data} from row {first}" if first else job.data
    tokens = job.eval_tokens // (1 + len(ladder.rungs))
    return replace(job, rows=max(1, last - first), data=data, eval_tokens=tokens), end / steps


@dataclass(frozen=True)
class World:
    """Set what may happen: `noise` is the standard deviation of a stretch of steps as a share of its time.

    `stop` returns the share of a job's steps that it runs; `fail` is the chance that a job dies, at a uniform
    share of its steps; `crash_s` is the mean time between crashes of a group, each of which costs
    `recover_s`; `arrivals` are jobs that come at a time in seconds; with `refill` an idle slot takes any
    waiting job that fits. `ladders` names the rungs at which a job is scored, as at its end. `smaller` returns
    the seconds of a pack's step with fewer slots: a pack is then compiled again, in `compile_s`, once half its slots
    or fewer are used.
    """

    noise: float = 0.0
    stop: Stop | None = None
    fail: float = 0.0
    crash_s: float = 0.0
    recover_s: float = 60.0
    arrivals: tuple[tuple[float, JobSpec], ...] = ()
    refill: bool = True
    ladders: Callable[[JobSpec], Ladder] | None = None
    smaller: Callable[[Pack, int], float] | None = None
    compile_s: float = 0.0


@dataclass
class Outcome:
    """Hold what happened: seconds until the last job ended, when each job ended and how."""

    makespan_s: float = 0.0
    ended: dict[str, float] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)  # completed | stopped | failed
    refills: int = 0
    crashes: int = 0
    left: list[str] = field(default_factory=list)  # late jobs that fitted no pack


def ladder_stops(ladders: Callable[[JobSpec], Ladder]) -> Stop:
    """Return early stopping by successive halving, scores being unknown beforehand: 1/eta pass each rung."""

    def stop(job: JobSpec, rng: random.Random) -> float:
        ladder = ladders(job)
        for rung in ladder.rungs:
            if rng.random() >= 1 / ladder.eta:
                return rung
        return 1.0

    return stop


def asha_stops(eta: int = 3, rungs: Sequence[float] = (1 / 9, 1 / 3)) -> Stop:
    """Return the early stopping of one ladder for all jobs."""
    return ladder_stops(lambda _: Ladder(eta, tuple(rungs)))


def signature(pack: Pack, jobs: Sequence[JobSpec], precision: str) -> Signature:
    """Return the signature of a planned pack's program."""
    targets = [job.targets for job in jobs]
    union = None if None in targets else frozenset().union(*(t for t in targets if t is not None))
    return Signature(
        pack.J,
        pack.m,
        pack.length_buckets,
        max(pack.slots),
        union,
        any(job.has_dropout for job in jobs),
        frozenset(job.optimizer for job in jobs),
        precision,
        pack.policy,
        any(job.sums(pack.m) for job in jobs),
    )


class Fate(NamedTuple):
    """Say how a job ends: after which share of its steps, in what way, after which share of its scorings."""

    share: float = 1.0
    how: str = "completed"
    scored: float = 1.0


def _fates(specs: Mapping[str, JobSpec], world: World, rng: random.Random) -> dict[str, Fate]:
    fates = {}
    for job_id in sorted(specs):
        job, share, how = specs[job_id], 1.0, "completed"
        if world.stop is not None and (s := world.stop(job, rng)) < 1:
            share, how = s, "stopped"
        if rng.random() < world.fail:
            share, how = rng.random() * share, "failed"
        rungs = world.ladders(job).rungs if world.ladders else ()
        passed = sum(rung < share - CLOSE for rung in rungs)
        fates[job_id] = Fate(share, how, (1 + passed) / (1 + len(rungs)))
    return fates


class _Run:
    """Hold one simulation in progress: the clock of every group, the packs to come, jobs that wait."""

    def __init__(
        self,
        packs: Sequence[Pack],
        precision: str,
        specs: Mapping[str, JobSpec],
        world: World,
        rng: random.Random,
        fate: Mapping[str, Fate],
    ) -> None:
        self.packs, self.precision, self.specs = packs, precision, dict(specs)
        self.world, self.rng, self.fate = world, rng, fate
        self.outcome = Outcome()
        self.taken: set[str] = set()
        self.unbegun = {id(pack) for pack in packs}
        self.late = sorted(world.arrivals, key=lambda item: (item[0], item[1].job_id))
        self.queues = {id(pack): _slot_queues(pack) for pack in packs}

    def next_job(
        self, pack: Pack, slot: int, clock: float, own: Signature, horizon: int
    ) -> tuple[str, float] | None:
        """Return the job that takes a free slot, and its scoring seconds: the slot's own next one, else one
        that fits.

        A job of another pack is taken only where it needs no more steps than this pack has before it
        (`horizon`): longer ones would keep all the slots running for one.
        """
        for queue in [self.queues[id(pack)][slot], *(self.queues[id(pack)] if self.world.refill else [])]:
            while queue:
                job_id, scoring = queue.pop(0)
                if job_id not in self.taken:
                    return job_id, scoring
        if not self.world.refill:
            return None
        for n, (time, job) in enumerate(self.late):
            if time <= clock and job.job_id not in self.taken and fits(own, job):
                del self.late[n]
                self.outcome.refills += 1
                return job.job_id, 0.0
        for other in self.packs:
            for queue in self.queues[id(other)]:
                for n, (job_id, scoring) in enumerate(queue):
                    job = self.specs[job_id]
                    short = -(-job.rows // pack.m) <= horizon
                    if other.start_s > clock and job_id not in self.taken and short and fits(own, job):
                        del queue[n]
                        self.outcome.refills += 1
                        return job_id, scoring
        return None

    def stretch(self, steps: int, step_s: float) -> float:
        """Return the seconds of some steps: their time, noise, and crashes."""
        seconds = steps * step_s
        if self.world.noise:
            seconds *= max(0.1, 1 + self.rng.gauss(0, self.world.noise))
        if self.world.crash_s:
            done = self.rng.expovariate(1 / self.world.crash_s)
            while done < seconds:
                self.outcome.crashes += 1
                seconds += self.world.recover_s
                done += self.rng.expovariate(1 / self.world.crash_s) + self.world.recover_s
        return seconds

    def run_pack(self, pack: Pack, clock: float) -> Iterator[float]:
        """Run one pack from `clock`; yield the time at each event, last when it ends."""
        self.unbegun.discard(id(pack))
        if all(job_id in self.taken for job_id in pack.jobs):
            yield clock
            return
        own = signature(pack, [self.specs[j] for j in pack.jobs], self.precision)
        clock, step_s, slots = clock + pack.setup_s, pack.step_s, pack.J
        busy: dict[int, tuple[str, int, float]] = {}  # slot -> job, steps left, scoring
        idle = list(range(pack.J))
        while True:
            yield clock
            for slot in list(idle):
                horizon = max((left for _, left, _ in busy.values()), default=0)
                found = self.next_job(pack, slot, clock, own, horizon)
                if found is None:
                    continue
                job_id, scoring = found
                self.taken.add(job_id)
                steps, fate = -(-self.specs[job_id].rows // pack.m), self.fate[job_id]
                busy[slot] = (job_id, max(1, round(steps * fate.share)), scoring * fate.scored)
                idle.remove(slot)
            if not busy:
                return
            fewer = 1 << (len(busy) - 1).bit_length()
            most = max(left for _, left, _ in busy.values())
            if self.world.smaller and not self.unbegun and fewer <= slots // 2 and most >= PAYS_AFTER:
                slots, idle = fewer, idle[: fewer - len(busy)]
                step_s = self.world.smaller(pack, slots)
                clock += self.world.compile_s
            steps = min(left for _, left, _ in busy.values())
            clock += self.stretch(steps, step_s)
            for slot in sorted(busy):
                job_id, left, scoring = busy[slot]
                if left > steps:
                    busy[slot] = (job_id, left - steps, scoring)
                    continue
                clock += scoring
                self.outcome.ended[job_id], self.outcome.how[job_id] = clock, self.fate[job_id].how
                del busy[slot]
                idle.append(slot)
            idle.sort()


def simulate(
    plan: Plan,
    specs: dict[str, JobSpec],
    world: World | None = None,
    seed: int = 0,
    replan: Replan | None = None,
) -> Outcome:
    """Run a plan in a world; `specs` maps every job id of the plan to its job.

    A plan rung by rung asks `replan` at every rung; without it jobs go on in the packs of the plan.
    """
    world, rng = world or World(), random.Random(seed)
    everyone = specs | {job.job_id: job for _, job in world.arrivals}
    fates = _fates(everyone, world, rng)
    if plan.packs and plan.packs[0].rung is not None:
        return _climb(plan, everyone, world, rng, fates, replan)
    return _run(_Run(plan.packs, plan.precision, everyone, world, rng, fates), plan.busy_until)


def _run(run: _Run, busy_until: Sequence[float] = ()) -> Outcome:
    """Let each device take one pack after another, from when it is free."""
    packs = sorted(run.packs, key=lambda pack: (pack.start_s, pack.devices))
    before = [  # the packs that must end first: the last one on each device
        {max((q for q in range(p) if device in packs[q].devices), default=-1) for device in packs[p].devices}
        - {-1}
        for p in range(len(packs))
    ]
    ended: dict[int, float] = {}
    waiting = set(range(len(packs)))
    running: list[tuple[float, int, Iterator[float]]] = []
    while waiting or running:
        for p in sorted(waiting):
            if before[p] <= ended.keys():
                free = [busy_until[device] for device in packs[p].devices] if busy_until else []
                ready = max([*(ended[q] for q in before[p]), *free], default=0.0)
                heapq.heappush(running, (ready, p, run.run_pack(packs[p], ready)))
                waiting.discard(p)
        clock, p, events = heapq.heappop(running)
        after = next(events, None)
        if after is None:
            ended[p] = clock
        else:
            heapq.heappush(running, (after, p, events))
    run.outcome.makespan_s = max(run.outcome.ended.values(), default=0.0)
    run.outcome.left = [job.job_id for _, job in run.late]
    return run.outcome


def _climb(
    plan: Plan,
    specs: Mapping[str, JobSpec],
    world: World,
    rng: random.Random,
    fates: Mapping[str, Fate],
    replan: Replan | None,
) -> Outcome:
    """Run the packs of one rung after another; jobs that came meanwhile are planned with those that pass."""
    calm = replace(world, arrivals=())
    late = sorted(world.arrivals, key=lambda item: (item[0], item[1].job_id))
    whole, rung, clock = Outcome(), 0, 0.0
    done = {job_id: 0.0 for pack in plan.packs if pack.rung == 0 for job_id in pack.jobs}
    packs = [pack for pack in plan.packs if pack.rung == 0]
    while packs:
        here, fate, ends = {}, {}, {}
        for job_id, begin in done.items():
            ladder = Ladder(1, tuple(plan.jobs[job_id]["rungs"])) if job_id in plan.jobs else Ladder(1, ())
            here[job_id], ends[job_id] = stretch(specs[job_id], ladder, begin)
            share, how, _ = fates[job_id]
            inside = (share - begin) / (ends[job_id] - begin)
            fate[job_id] = Fate(
                min(1.0, max(0.0, inside)), how if inside <= 1 + CLOSE and how != "completed" else ""
            )
        found = _run(_Run(packs, plan.precision, here, calm, rng, fate))
        done = {}
        for job_id, at in found.ended.items():
            if found.how[job_id] or ends[job_id] >= 1:
                whole.ended[job_id], whole.how[job_id] = clock + at, found.how[job_id] or "completed"
            else:
                done[job_id] = ends[job_id]
        whole.refills, whole.crashes = whole.refills + found.refills, whole.crashes + found.crashes
        clock, rung = clock + found.makespan_s, rung + 1
        if replan and late and not done:
            clock = max(clock, late[0][0])
        while replan and late and late[0][0] <= clock:
            done[late.pop(0)[1].job_id] = 0.0
        if replan:
            packs = list(replan(done, rung)) if done else []
        else:
            packs = [kept for pack in plan.packs if pack.rung == rung and (kept := _without(pack, done)).jobs]
    whole.makespan_s = max(whole.ended.values(), default=0.0)
    whole.left = [job.job_id for _, job in late]
    return whole


def _without(pack: Pack, going: Mapping[str, float]) -> Pack:
    """Return a pack with those of its jobs alone that go on."""
    assign = tuple(a for a in pack.assign if a.job_id in going)
    return replace(pack, jobs=tuple(a.job_id for a in assign), assign=assign)


def expected_makespan(plan: Plan, specs: dict[str, JobSpec], stop: Stop, draws: int = 20) -> float:
    """Return the mean simulated makespan under early stopping with slot refill."""
    return sum(simulate(plan, specs, World(stop=stop), seed).makespan_s for seed in range(draws)) / draws


def _slot_queues(pack: Pack) -> list[list[tuple[str, float]]]:
    """Return each slot's jobs in order with the seconds of scoring each."""
    queues: list[list[tuple[str, float]]] = [[] for _ in range(pack.J)]
    for a in sorted(pack.assign, key=lambda a: (a.slot, a.start_s)):
        queues[a.slot].append((a.job_id, a.scoring_s))
    return queues
