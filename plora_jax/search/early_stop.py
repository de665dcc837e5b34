"""Early stopping: which jobs will not win, told from everyone's scores so far. Pure functions of the history."""

import math
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Literal, NamedTuple

from plora_jax.config.space import setting
from plora_jax.config.yamlfile import Faults

CLOSE = 1e-9  # a fraction this close to a rung has reached it


class Point(NamedTuple):
    """Hold one evaluation of a job: optimizer steps done, their share of all its steps, and what was measured.

    `loss` is held-out, `train_loss` that of the steps since the evaluation before. A last point at fraction 1 whose
    score is NaN stands for a job that failed: without one, `halving` stops no more jobs of its cohort.
    """

    step: int
    fraction: float
    score: float
    loss: float
    train_loss: float


class Verdict(NamedTuple):
    """Say whether a job is stopped, and why."""

    stop: bool
    reason: str = ""


CONTINUE = Verdict(False)
History = Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class EarlyStop:
    """Say when a job that will not win is stopped."""

    method: Literal["none", "median", "asha", "halving", "plateau"] = setting("none", "the rule")
    grace_period: float | None = setting(
        None,
        "share of its training before which a job is not stopped; the first rung of asha and halving. "
        "None: 1/reduction_factor² for those, 0.2 for median and plateau",
        low=0.0,
        open_low=True,
        high=0.99,
    )
    reduction_factor: int = setting(
        3, "asha, halving: one job in this many passes a rung; rungs are this factor apart", low=2, high=1000
    )
    brackets: int = setting(
        1, "asha: deal the jobs to this many ladders, each without the first rung of the one before", low=1
    )
    cohort: int | None = setting(
        None, "halving: jobs that are compared together. None: as many as leave one at the last rung", low=2
    )
    pause: Literal["auto", "always", "never"] = setting(
        "auto",
        "asha, halving: jobs wait at a rung, and those that go on are planned anew; auto: where that is expected to "
        "end earlier",
    )
    min_jobs: int = setting(3, "median: other jobs that must have come as far", low=1)
    patience: int = setting(3, "plateau: evaluations in a row without a gain", low=1)
    min_delta: float = setting(0.0, "plateau: change of loss or score that counts as a gain", low=0.0)
    max_loss_ratio: float = setting(
        2.0, "plateau: a held-out loss above this many times the base model's has diverged", low=1.0
    )
    every: float = setting(
        0.1, "median, plateau: share of a job's training from one judgement to the next", low=0.001, high=0.5
    )

    @property
    def grace(self) -> float:
        """Return the grace period in force, a share of a job's training."""
        if self.grace_period is not None:
            return self.grace_period
        return self.reduction_factor**-2 if self.method in ("asha", "halving") else 0.2

    def rungs(self, bracket: int = 0) -> tuple[float, ...]:
        """Return the fractions in (0, 1), rising, at which the jobs of a bracket are scored and judged."""
        step, count = self.every, math.ceil(1 / self.every)
        if self.method in ("median", "plateau"):
            return tuple(k * step for k in range(1, count) if k * step < 1 - CLOSE)
        if self.method == "none":
            return ()
        out, rung = [], self.grace * self.reduction_factor**bracket
        while rung < 1 - CLOSE:
            out.append(rung)
            rung *= self.reduction_factor
        return tuple(out)


READ_BY = {  # the settings that each method reads
    "none": (),
    "median": ("grace_period", "min_jobs", "every"),
    "asha": ("grace_period", "reduction_factor", "brackets", "pause"),
    "halving": ("grace_period", "reduction_factor", "cohort", "pause"),
    "plateau": ("grace_period", "patience", "min_delta", "max_loss_ratio", "every"),
}


def check_early_stop(given: Mapping[str, object], faults: Faults) -> None:
    """Note the settings of the section that its method does not read, and brackets that have no rung."""
    config = EarlyStop(**given)  # type: ignore[arg-type]  # each value was checked by itself
    for name in given:
        if name != "method" and name not in READ_BY[config.method]:
            methods = [method for method, names in READ_BY.items() if name in names]
            faults.add(
                ("early_stop", name),
                f"has no effect with method: {config.method}; it belongs to {', '.join(methods)}",
            )
    ladders = len(EarlyStop("asha", config.grace_period, config.reduction_factor).rungs())
    if config.method == "asha" and config.brackets > ladders:
        faults.add(
            ("early_stop", "brackets"),
            f"{config.brackets} is too large; there are {ladders} rungs to start from",
        )


@dataclass(frozen=True)
class Rule:
    """Never stop a job: the rule `none`, and what all rules have in common.

    Score all slots of a micro-step first and decide on each of those jobs afterwards: then they are compared with
    each other, and the order of the slots matters for exact ties alone.
    """

    config: EarlyStop
    higher_is_better: bool
    base_loss: float | None = None

    def rungs(self) -> tuple[float, ...]:
        """Return the fractions in (0, 1) at which jobs are scored and judged; further evaluations are welcome."""
        return self.config.rungs()

    def decide(self, job_id: str, history: History) -> Verdict:
        """Judge a job at its newest point, given all jobs' points so far, the jobs in the order of the journal."""
        newest = history[job_id][-1]
        if self.config.method == "none" or newest.fraction >= 1 - CLOSE:
            return CONTINUE
        if not (math.isfinite(newest.score) and math.isfinite(newest.loss)):
            return Verdict(True, f"diverged: not finite at {newest.fraction:.0%} of its training")
        return self._judge(job_id, history)

    def _judge(self, job_id: str, history: History) -> Verdict:
        return CONTINUE

    def badness(self, point: Point) -> float:
        """Return the score turned so that lower is better; what is not finite is worst."""
        if not math.isfinite(point.score):
            return math.inf
        return -point.score if self.higher_is_better else point.score

    def ranked(self, job_ids: Sequence[str], history: History, rung: float) -> list[str]:
        """Order jobs by what they scored at a rung, best first: by score, then loss, then the order given."""

        def key(job_id: str) -> tuple[float, float]:
            point = at_rung(history[job_id], rung)
            assert point is not None
            return self.badness(point), point.loss if math.isfinite(point.loss) else math.inf

        return sorted(job_ids, key=key)


def at_rung(points: Sequence[Point], rung: float) -> Point | None:
    """Return a job's record at a rung: its first point there or beyond, None if it has not come so far."""
    return next((point for point in points if point.fraction >= rung - CLOSE), None)


class Median(Rule):
    """Stop a job whose best score so far is worse than the median of the others' mean scores up to here.

    The rule of Vizier (Golovin et al., 2017, section 3.2.2) as Ray Tune's MedianStoppingRule has it: the others
    are all jobs that came as far, running or not; means are taken from the grace period on; strictly worse.
    """

    def _judge(self, job_id: str, history: History) -> Verdict:
        here, grace = history[job_id][-1].fraction, self.config.grace
        means = []
        for other, points in history.items():
            if other != job_id and points[-1].fraction >= here - CLOSE:
                window = [p for p in points if grace - CLOSE <= p.fraction <= here + CLOSE]
                means += [fmean(map(self.badness, window))] if window else []
        best = min(map(self.badness, history[job_id]))
        if len(means) < self.config.min_jobs or best <= median(means):
            return CONTINUE
        sign = -1 if self.higher_is_better else 1
        told = f"best {sign * best:.4g} against a median of {sign * median(means):.4g}"
        return Verdict(True, f"median: {told} at {here:.0%} of its training")


class Asha(Rule):
    """Stop a job at a rung unless it is among the best 1/η of all that have reached it.

    Asynchronous successive halving (Li et al., 2020) in the stopping form of Ray Tune's ASHAScheduler: a job that
    passes trains on at once, and no verdict is taken back. Of n jobs at a rung the best max(1, ⌊n/η⌋) pass, this
    one included (Algorithm 2's top 1/η; Ray compares with an interpolated percentile of the others, which depends
    on the scale of the score). So the first arrival always passes, and until η jobs are there only a new best does.
    """

    def _judge(self, job_id: str, history: History) -> Verdict:
        eta, bracket = self.config.reduction_factor, bracket_of(job_id, self.config)
        own = history[job_id]
        for rung in self.config.rungs(bracket):
            if at_rung(own, rung) is not own[-1]:  # not there yet, or judged before
                continue
            there = [
                name
                for name, points in history.items()
                if points[-1].fraction >= rung - CLOSE and bracket_of(name, self.config) == bracket
            ]
            place, passing = self.ranked(there, history, rung).index(job_id), max(1, len(there) // eta)
            if place >= passing:
                return Verdict(True, _outranked("asha", place, there, rung, passing))
        return CONTINUE


class Halving(Rule):
    """Stop all but the best 1/η of a cohort at a rung, once all of it that is left has come there.

    Synchronous successive halving (Jamieson & Talwalkar, 2016). Cohorts are consecutive jobs of the journal. Nobody
    waits: a job that reaches a rung before the last of its cohort trains on, and is judged at its next evaluation.
    """

    def _judge(self, job_id: str, history: History) -> Verdict:
        eta, rungs = self.config.reduction_factor, self.config.rungs()
        size = self.config.cohort or eta ** len(rungs)
        names = list(history)
        first = names.index(job_id) // size * size
        alive = names[first : first + size]
        if len(alive) < size:
            return CONTINUE
        for rung in rungs:
            if any(history[name][-1].fraction < rung - CLOSE for name in alive):
                return CONTINUE
            order, passing = self.ranked(alive, history, rung), max(1, len(alive) // eta)
            if job_id in order[passing:]:
                return Verdict(True, _outranked("halving", order.index(job_id), alive, rung, passing))
            passed = [name for name in order[:passing] if math.isfinite(self.badness(history[name][-1]))]
            alive = [name for name in alive if name in passed]
        return CONTINUE


def _outranked(rule: str, place: int, there: Sequence[str], rung: float, passing: int) -> str:
    return f"{rule}: rank {place + 1} of {len(there)} at {rung:.3g} of its training; {passing} passed"


class Plateau(Rule):
    """Stop a job that diverged, that overfits, or that no longer gains.

    A gain is a held-out loss lower, or a score better, than any before by more than `min_delta`. After `patience`
    evaluations in a row without one the job is stopped: as overfit when its training loss went on falling (the held-
    out loss against the training loss, as in ALTO), else as a plateau. Diverged is what is above `max_loss_ratio`
    times the base model's held-out loss, at any time; without a `base_loss`, times the job's first.
    """

    def _judge(self, job_id: str, history: History) -> Verdict:
        points, delta = history[job_id], self.config.min_delta
        newest, start = points[-1], self.base_loss if self.base_loss is not None else points[0].loss
        if newest.loss > self.config.max_loss_ratio * start:
            return Verdict(True, f"diverged: held-out loss {newest.loss:.4g}, {start:.4g} at the start")
        if newest.fraction < self.config.grace - CLOSE:
            return CONTINUE
        best, loss, badness = points[0], points[0].loss, self.badness(points[0])
        without = 0
        for point in points[1:]:
            gain = point.loss < loss - delta or self.badness(point) < badness - delta
            loss, badness = min(loss, point.loss), min(badness, self.badness(point))
            best, without = (point, 0) if gain else (best, without + 1)
        if without < self.config.patience:
            return CONTINUE
        if newest.loss > best.loss and newest.train_loss < best.train_loss:
            told = (
                f"held-out loss rose from {best.loss:.4g} to {newest.loss:.4g} while the training loss fell"
            )
            return Verdict(True, f"overfit: {told}, {without} evaluations")
        return Verdict(True, f"plateau: no gain in {without} evaluations")


RULES = {"none": Rule, "median": Median, "asha": Asha, "halving": Halving, "plateau": Plateau}


def make_rule(config: EarlyStop, higher_is_better: bool, base_loss: float | None = None) -> Rule:
    """Return the rule of a configuration; `base_loss` is the base model's held-out loss, where it is known."""
    return RULES[config.method](config, higher_is_better, base_loss)


def bracket_of(job_id: str, config: EarlyStop) -> int:
    """Return the bracket of a job, 0 to brackets - 1: a function of its id alone.

    Jobs are dealt so that all brackets are expected to train the same number of tokens, as Hyperband's do.
    """
    if config.brackets == 1:
        return 0
    ends = list(accumulate(_shares(config)))
    return min(bisect_right(ends, zlib.crc32(job_id.encode()) / 2**32), config.brackets - 1)


def _shares(config: EarlyStop) -> list[float]:
    """Return each bracket's share of the jobs."""
    weights = [1 / _cost(config.rungs(b), config.reduction_factor) for b in range(config.brackets)]
    return [weight / sum(weights) for weight in weights]


def _cost(rungs: Sequence[float], eta: int) -> float:
    """Return the share of its training that a job does when exactly one in eta passes each rung."""
    ends = [*rungs, 1.0]
    return sum((end - begin) / eta**k for k, (begin, end) in enumerate(zip([0.0, *rungs], ends, strict=True)))


def expected_fraction(config: EarlyStop, n_jobs: int, together: int = 1) -> float | None:
    """Return the share of all jobs' tokens that a rule trains, scores being unknown beforehand.

    asha: `together` jobs reach the first rung at a time, in an order that has nothing to do with their scores; the
    more there are together, the fewer first arrivals pass. With together = n_jobs nothing is left to chance, and
    this is a bound. halving: whole cohorts that run side by side. None for median and plateau, whose cost depends
    on the curves; `scripts/early_stop_sim.py` tells it from a record.
    """
    eta = config.reduction_factor
    if config.method == "none":
        return 1.0
    if config.method == "halving":
        size = config.cohort or eta ** len(config.rungs())
        whole, rest = divmod(n_jobs, size)
        return (whole * _spent(config.rungs(), eta, size, size) + rest) / n_jobs
    if config.method != "asha":
        return None
    shares = _shares(config)
    return sum(
        _spent(config.rungs(bracket), eta, n_jobs * share, max(1.0, together * share)) / n_jobs
        for bracket, share in enumerate(shares)
    )


def _spent(rungs: Sequence[float], eta: int, jobs: float, wave: float) -> float:
    """Return the expected tokens of jobs that come to the first rung in waves, in trainings of one job."""
    spent, begin = 0.0, 0.0
    for rung in rungs:
        spent, begin = spent + jobs * (rung - begin), rung
        passed, seen = 0.0, 0.0
        while seen < jobs - CLOSE:
            more = min(wave, jobs - seen)
            seen += more
            passed += more * min(1.0, max(1, math.floor(seen / eta + CLOSE)) / seen)
        jobs, wave = passed, max(1.0, wave * passed / jobs)
    return spent + jobs * (1 - begin)


@dataclass(frozen=True)
class EvalConfig:
    """Say how often the jobs are scored on data.eval while they train; always at the end."""

    every_epochs: float | None = setting(
        None, "score after this share of an epoch, again and again", low=0.0, open_low=True
    )
    every_steps: int | None = setting(None, "score after this many optimizer steps, again and again", low=1)

    def steps(self, total: int, per_epoch: int, rungs: Sequence[float] = ()) -> list[int]:
        """Return the optimizer steps after which a job is scored, rising, the last of its `total` among them.

        Rungs and shares of an epoch (of `per_epoch` steps) are rounded up to whole steps.
        """
        period = max(1, self.every_steps or (self.every_epochs or math.inf) * per_epoch)
        found = {_whole(k * period) for k in range(1, math.floor(total / period) + 1)}
        found |= {_whole(rung * total) for rung in rungs}
        return sorted(step for step in found | {total} if step <= total)


def rung_steps(config: EarlyStop, job_id: str, total: int) -> list[int]:
    """Return the optimizer steps, of a job's `total`, that its rungs fall on, before its last."""
    steps = {_whole(rung * total) for rung in config.rungs(bracket_of(job_id, config))}
    return sorted(step for step in steps if step < total)


def _whole(steps: float) -> int:
    return max(1, math.ceil(steps - CLOSE))
