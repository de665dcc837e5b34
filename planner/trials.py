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
    """Hold the packs that a group of one degree may run: a row is a program and the jobs short enough for its
    micro-steps L, a trial a row, L and J.
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
    parts: list[tuple[np.ndarray, ...]] = []
    n_rows, n_trials = 0, 0
    for kind, ((need, _, _), of_policy) in enumerate(programs.items()):
        pairs = np.flatnonzero(types.t == of_policy[0])
        steps = np.zeros(len(own), dtype=int)
        steps[types.k[pairs]] = types.steps[pairs]
        J, step_s = _useful(types, of_policy)
        spans = _lengths(steps) if most is None else _spans(steps, room / step_s.min())
        L, upto = np.array(spans, dtype=int).reshape(-1, 2).T
        held = np.where(steps <= upto[:, None], steps, 0)
        needed = -(-(held @ jobs) // upto)  # slots that hold all jobs side by side
        seconds = L[:, None] * step_s + instance.cost.compile_s
        kept = (needed[:, None] >= J) & (seconds <= room)
        if most is None:
            kept &= (J <= 24) | (J % 4 == 0) | (needed[:, None] == J) | np.isin(J, types.limit[of_policy])
        span, trial = kept.nonzero()
        capacity = J[trial] * upto[span]
        _, rows, row = np.unique((held > 0).sum(axis=1)[span], return_index=True, return_inverse=True)
        rows = span[rows]
        tight = np.tile((buckets == need.bucket, lengths == need.S), (len(rows), 1, 1))
        parts.append((held[rows], np.full(len(rows), kind), tight, row + n_rows, capacity, seconds[kept]))
        n_rows, n_trials = n_rows + len(rows), n_trials + len(row)
        if most is not None and n_trials > most:
            raise TooManyError
    steps, kinds, tight, row, capacity, seconds = map(np.concatenate, zip(*parts, strict=True))
    return Table(degree, steps, kinds, tight.transpose(1, 0, 2), row, capacity, seconds)


def _useful(types: Types, of_policy: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of slots of a program, the most first, and the least seconds of a step that each takes; those
    that more slots beat are left out.
    """
    slots = [np.arange(1, int(types.limit[t]) + 1) for t in of_policy]
    J = np.concatenate(slots)
    step_s = np.concatenate(
        [types.t0[t] + own * types.slot_s[t] for t, own in zip(of_policy, slots, strict=True)]
    )
    order = np.lexsort((step_s, -J))
    J, step_s = J[order], step_s[order]
    useful = np.append(True, step_s[1:] < np.minimum.accumulate(step_s)[:-1])
    return J[useful], step_s[useful]


def _lengths(steps: np.ndarray) -> list[tuple[int, int]]:
    """Return the micro-steps a pack may last, as spans of one: multiples of its jobs' own, near ones once."""
    out: list[int] = []
    for L in sorted({int(w * s) for s in set(steps[steps > 0]) for w in range(1, WAVES + 1)}):
        if not out or 1.02 * out[-1] < L:
            out.append(L)
    return [(L, L) for L in out]


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


class Best(NamedTuple):
    """Hold the jobs worth most that each trial takes: the first `whole` classes of its line's order and `part` jobs of
    the next. A line is a row of the table and the jobs of one state.
    """

    order: np.ndarray  # [line, class]
    jobs: np.ndarray  # [line, class] jobs there are, in that order
    line: np.ndarray  # [trial]
    whole: np.ndarray  # [trial]
    part: np.ndarray  # [trial]
    worth: np.ndarray  # [trial]

    def taken(self, trial: int) -> np.ndarray:
        """Return the jobs of each class that a trial takes."""
        line, whole = self.line[trial], self.whole[trial]
        taken = np.zeros(self.jobs.shape[1], dtype=self.part.dtype)
        at = self.order[line, : whole + 1]
        taken[at] = self.jobs[line, : whole + 1]
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

    def best(
        self, jobs: np.ndarray, state: np.ndarray, row: np.ndarray, capacity: np.ndarray, cut: bool = False
    ) -> Best:
        """Fill every trial with the jobs [state, class] that are worth most a micro-step, up to its capacity; `cut`
        fills it wholly, with a share of the last job.
        """
        R, K = self.order.shape
        line = state * R + row
        used = np.zeros(len(jobs) * R, dtype=bool)
        used[line] = True
        lines = used.nonzero()[0]
        line, rows = (np.cumsum(used) - 1)[line], lines % R
        order, steps, worth = self.order[rows], self.steps[rows], self.worth[rows]
        jobs = jobs[(lines // R)[:, None], order] * self.member[rows]
        work, value = np.zeros((len(lines), K + 1), dtype=np.int64), np.zeros((len(lines), K + 1))
        np.cumsum(jobs * steps, axis=1, out=work[:, 1:])
        np.cumsum(jobs * worth, axis=1, out=value[:, 1:])
        stride = int(work[:, -1].max()) + int(capacity.max()) + 1
        rising = (work + stride * np.arange(len(lines))[:, None]).ravel()
        whole = np.searchsorted(rising, capacity + stride * line, side="right") - 1 - line * (K + 1)
        last = np.minimum(whole, K - 1)
        room, step = capacity - work[line, whole], steps[line, last]
        part = np.where(whole < K, room / step if cut else room // step, 0)
        part = np.minimum(part, jobs[line, last])
        return Best(order, jobs, line, whole, part, value[line, whole] + part * worth[line, last])
