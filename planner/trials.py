"""The packs that a group of one degree may run, as arrays: how many micro-steps, how many slots, and which jobs are
worth most in them.
"""

from typing import NamedTuple

import numpy as np

from planner.config_lp import Types
from planner.instance import Instance

WAVES = 4  # a pack lasts at most so many times as long as one of its jobs
SPANS = 200  # the most lengths of a program's packs that are all listed
WIDTH = 1.002  # the longest of a span over its shortest, at most


class Table(NamedTuple):
    """Hold the packs that a group of one degree may run: a row is a program and its micro-steps L, a trial a row
    and J.
    """

    degree: int
    steps: np.ndarray  # [row, class] micro-steps of a job; 0 where the row cannot take it
    kind: np.ndarray  # [row] number of the program
    tight: (
        np.ndarray
    )  # [2, row, class] whether the program's rank bucket, and its length, are the class's own
    row: np.ndarray  # [trial]
    capacity: np.ndarray  # [trial] J · L
    seconds: np.ndarray  # [trial] L · (t0 + J · slot) + compile


class TooManyError(Exception):
    """Say that a table would have too many rows or trials."""


def make_table(instance: Instance, types: Types, degree: int, room: float, most: int | None = None) -> Table:
    """List the packs that take at most `room` seconds, but those that another program of their row beats.

    Lengths and numbers of slots are thinned out; with `most` all are there.

    Raises:
        TooManyError: all are more than `most`.
    """
    programs: dict[tuple, list[int]] = {}
    for t, need in enumerate(types.needs):
        if need[2] == degree:
            programs.setdefault(need, []).append(t)
    own, jobs = instance.own_needs, np.array([n for _, n in instance.counts])
    buckets, lengths = np.array([need.bucket for need in own]), np.array([need.S for need in own])
    rows: list[np.ndarray] = []
    kinds: list[int] = []
    tight: list[tuple[np.ndarray, np.ndarray]] = []
    trials: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    count = 0
    for kind, ((need, _, _), of_policy) in enumerate(programs.items()):
        pairs = np.flatnonzero(types.t == of_policy[0])
        steps = np.zeros(len(own), dtype=int)
        steps[types.k[pairs]] = types.steps[pairs]
        longest = room / min(types.t0[t] + types.slot_s[t] for t in of_policy)
        work = jobs * steps
        spans = [(L, L) for L in _lengths(steps)] if most is None else _spans(steps, longest)
        for L, upto in spans:
            needed = -(-int(work[steps <= upto].sum()) // upto)  # slots that hold all jobs side by side
            slots = [_slots(min(int(types.limit[t]), needed), most is not None) for t in of_policy]
            size = np.concatenate(slots) * upto
            step_s = np.concatenate(
                [types.t0[t] + J * types.slot_s[t] for t, J in zip(of_policy, slots, strict=True)]
            )
            order = np.lexsort((step_s, -size))
            size, seconds = size[order], L * step_s[order] + instance.cost.compile_s
            least = np.minimum.accumulate(seconds)
            kept = np.concatenate([[True], seconds[1:] < least[:-1]]) & (seconds <= room)
            if kept.any():
                trials.append((np.full(kept.sum(), len(rows)), size[kept], seconds[kept]))
                rows.append(np.where(steps <= upto, steps, 0))
                kinds.append(kind)
                tight.append((buckets == need.bucket, lengths == need.S))
                count += len(trials[-1][0])
        if most is not None and count > most:
            raise TooManyError
    row, capacity, seconds = (
        map(np.concatenate, zip(*trials, strict=True)) if trials else (np.zeros(0, dtype=int),) * 3
    )
    return Table(
        degree,
        np.array(rows).reshape(-1, len(own)),
        np.array(kinds),
        np.array(tight, dtype=bool).reshape(-1, 2, len(own)).transpose(1, 0, 2),
        row,
        capacity,
        seconds,
    )


def _lengths(steps: np.ndarray) -> list[int]:
    """Return the micro-steps a pack may last: multiples of its jobs' own, near ones once."""
    out: list[int] = []
    for L in sorted({int(w * s) for s in set(steps[steps > 0]) for w in range(1, WAVES + 1)}):
        if not out or 1.02 * out[-1] < L:
            out.append(L)
    return out


def _spans(steps: np.ndarray, longest: float) -> list[tuple[int, int]]:
    """Return every number of micro-steps up to the longest that jobs one after another may have, near ones as one span
    from the least to the most.

    Raises:
        TooManyError: these are more than SPANS.
    """
    own = sorted(set(steps[steps > 0].tolist()))
    sums: set[int] = set()
    last = {0}
    while last:
        last = {L + s for L in last for s in own if L + s <= longest} - sums
        sums |= last
        if len(sums) > 10 * SPANS:
            raise TooManyError
    out: list[tuple[int, int]] = []
    for L in sorted(sums):
        if out and WIDTH * out[-1][0] >= L:
            out[-1] = (out[-1][0], L)
        else:
            out.append((L, L))
    if len(out) > SPANS:
        raise TooManyError
    return out


def _slots(limit: int, every: bool) -> np.ndarray:
    """Return the numbers of slots to try: all of few, every fourth of many, the most that fit."""
    J = np.arange(1, limit + 1)
    return J[every | (J <= 24) | (J % 4 == 0) | (limit == J)]


class Best(NamedTuple):
    """Hold the jobs worth most that each trial takes: the first `whole` classes of its row's order and `part` jobs of
    the next.
    """

    order: np.ndarray  # [row, class]
    jobs: np.ndarray  # [row, class] jobs there are, in that order
    row: np.ndarray  # [trial]
    whole: np.ndarray  # [trial]
    part: np.ndarray  # [trial]
    worth: np.ndarray  # [trial]

    def taken(self, trial: int) -> np.ndarray:
        """Return the jobs of each class that a trial takes."""
        row, whole = self.row[trial], self.whole[trial]
        taken = np.zeros(self.jobs.shape[1], dtype=self.part.dtype)
        at = self.order[row, : whole + 1]
        taken[at] = self.jobs[row, : whole + 1]
        if whole < len(taken):
            taken[at[-1]] = self.part[trial]
        return taken


class Ranking:
    """Rank the classes of every row by their jobs' worth a micro-step."""

    def __init__(self, steps: np.ndarray, worth: np.ndarray) -> None:
        density = np.where(steps > 0, worth / np.maximum(steps, 1), -np.inf)
        self.order = np.argsort(-density, axis=1, kind="stable")
        steps = np.take_along_axis(steps, self.order, 1)
        self.member, self.steps = steps > 0, np.maximum(steps, 1)
        self.worth = np.where(self.member, worth[self.order], 0.0)

    def best(self, jobs: np.ndarray, row: np.ndarray, capacity: np.ndarray, cut: bool = False) -> Best:
        """Fill every trial with the jobs that are worth most a micro-step, up to its capacity; `cut` fills it wholly,
        with a share of the last job.
        """
        jobs = np.where(self.member, jobs[self.order], 0)
        R, K = jobs.shape
        work, value = np.zeros((R, K + 1), dtype=np.int64), np.zeros((R, K + 1))
        np.cumsum(jobs * self.steps, axis=1, out=work[:, 1:])
        np.cumsum(jobs * self.worth, axis=1, out=value[:, 1:])
        stride = int(work[:, -1].max()) + int(capacity.max()) + 1
        rising = (work + stride * np.arange(R)[:, None]).ravel()
        whole = np.searchsorted(rising, capacity + stride * row, side="right") - 1 - row * (K + 1)
        last = np.minimum(whole, K - 1)
        room, steps = capacity - work[row, whole], self.steps[row, last]
        part = np.where(whole < K, room / steps if cut else room // steps, 0)
        part = np.minimum(part, jobs[row, last])
        return Best(self.order, jobs, row, whole, part, value[row, whole] + part * self.worth[row, last])
