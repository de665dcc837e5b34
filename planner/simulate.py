"""A discrete-event simulation of a plan's execution: noise, early stops, failures, late jobs, slot refill.

Without noise and events it replays the plan to its predicted makespan. Each device group runs its packs in
order; in a pack all slots take steps together, a job's end pauses the pack for scoring, and its slot takes
the next job.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from planner.plan import Pack, Plan
from planner.signature import Signature, fits
from planner.specs import JobSpec

Stop = Callable[[JobSpec, random.Random], float]  # the share of its steps after which a job stops


@dataclass(frozen=True)
class World:
    """Set what may happen: `noise` is the standard deviation of a stretch of steps as a share of its time.

    `stop` returns the share of a job's steps that it runs; `fail` is the chance that a job dies, at a uniform
    share of its steps; `crash_s` is the mean time between crashes of a group, each of which costs
    `recover_s`; `arrivals` are jobs that come at a time in seconds; with `refill` an idle slot takes any
    waiting job that fits.
    """

    noise: float = 0.0
    stop: Stop | None = None
    fail: float = 0.0
    crash_s: float = 0.0
    recover_s: float = 60.0
    arrivals: tuple[tuple[float, JobSpec], ...] = ()
    refill: bool = True


@dataclass
class Outcome:
    """Hold what happened: seconds until the last job ended, when each job ended and how."""

    makespan_s: float = 0.0
    ended: dict[str, float] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)  # completed | stopped | failed
    refills: int = 0
    crashes: int = 0
    left: list[str] = field(default_factory=list)  # late jobs that fitted no pack


def asha_stops(eta: int = 3, rungs: Sequence[float] = (1 / 9, 1 / 3)) -> Stop:
    """Return early stopping as in ASHA, scores being unknown beforehand: 1/eta pass each rung."""

    def stop(_job: JobSpec, rng: random.Random) -> float:
        for rung in rungs:
            if rng.random() >= 1 / eta:
                return rung
        return 1.0

    return stop


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


class _Run:
    """Hold one simulation in progress: the clock of every group, the packs to come, jobs that wait."""

    def __init__(self, plan: Plan, specs: dict[str, JobSpec], world: World, seed: int) -> None:
        self.plan, self.specs, self.world = plan, dict(specs), world
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self.taken: set[str] = set()
        self.fate: dict[str, tuple[float, str]] = {}
        self.late = sorted(
            ((t, job) for t, job in world.arrivals), key=lambda item: (item[0], item[1].job_id)
        )
        for _, job in self.late:
            self.specs[job.job_id] = job
        for job_id in sorted(self.specs):
            share, how = 1.0, "completed"
            if world.stop is not None and (s := world.stop(self.specs[job_id], self.rng)) < 1:
                share, how = s, "stopped"
            if self.rng.random() < world.fail:
                share, how = self.rng.random() * share, "failed"
            self.fate[job_id] = (share, how)
        self.queues = {id(pack): _slot_queues(pack) for pack in plan.packs}

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
        for other in self.plan.packs:
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
        if all(job_id in self.taken for job_id in pack.jobs):
            yield clock
            return
        own = signature(pack, [self.specs[j] for j in pack.jobs], self.plan.precision)
        clock += pack.setup_s
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
                steps = -(-self.specs[job_id].rows // pack.m)
                busy[slot] = (job_id, max(1, round(steps * self.fate[job_id][0])), scoring)
                idle.remove(slot)
            if not busy:
                return
            steps = min(left for _, left, _ in busy.values())
            clock += self.stretch(steps, pack.step_s)
            for slot in sorted(busy):
                job_id, left, scoring = busy[slot]
                if left > steps:
                    busy[slot] = (job_id, left - steps, scoring)
                    continue
                clock += scoring
                self.outcome.ended[job_id], self.outcome.how[job_id] = clock, self.fate[job_id][1]
                del busy[slot]
                idle.append(slot)
            idle.sort()


def simulate(plan: Plan, specs: dict[str, JobSpec], world: World | None = None, seed: int = 0) -> Outcome:
    """Run a plan in a world; `specs` maps every job id of the plan to its job."""
    run = _Run(plan, specs, world or World(), seed)
    packs = sorted(plan.packs, key=lambda pack: (pack.start_s, pack.devices))
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
                ready = max((ended[q] for q in before[p]), default=0.0)
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


def expected_makespan(plan: Plan, specs: dict[str, JobSpec], stop: Stop, draws: int = 20) -> float:
    """Return the mean simulated makespan under early stopping with slot refill."""
    return sum(simulate(plan, specs, World(stop=stop), seed).makespan_s for seed in range(draws)) / draws


def _slot_queues(pack: Pack) -> list[list[tuple[str, float]]]:
    """Return each slot's jobs in order with the seconds of scoring each."""
    queues: list[list[tuple[str, float]]] = [[] for _ in range(pack.J)]
    for a in sorted(pack.assign, key=lambda a: (a.slot, a.start_s)):
        queues[a.slot].append((a.job_id, a.scoring_s))
    return queues
