"""Fill device groups one after another with the packs that waste least, jobs being worth their prices in the
configuration LP.

At these prices no pack is worth more than the machine time it takes. What it takes beyond its worth is lost,
and so is the time for which a group idles. A beam search chooses the packs of one group for the least loss; the
next group is filled with what is left (a dive, as in column generation for bin packing, with groups as columns).
"""

from itertools import count
from typing import NamedTuple

import numpy as np

from planner.config_lp import Types
from planner.groups import Group, Solution, insert
from planner.instance import Instance
from planner.pack import Choice, choose_pack, group_seconds

WAVES = 4  # a pack lasts at most so many times as long as one of its jobs
BEAM = 4  # groups half filled that are kept at each depth
DEEP = 6  # packs of a group after which only one is kept
MOST_LEFT = 128  # jobs left over that are put in one by one, which is slow with many groups
BRANCH = 2  # packs tried on each, beside the one that fills it best


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


def make_table(instance: Instance, types: Types, degree: int, room: float) -> Table:
    """List the packs that take at most `room` seconds, but those that another program of its row beats."""
    programs: dict[tuple, list[int]] = {}
    for t, need in enumerate(types.needs):
        if need[2] == degree:
            programs.setdefault(need, []).append(t)
    own = instance.own_needs
    buckets, lengths = np.array([need.bucket for need in own]), np.array([need.S for need in own])
    rows: list[np.ndarray] = []
    kinds: list[int] = []
    tight: list[tuple[np.ndarray, np.ndarray]] = []
    trials: list[tuple[int, int, float]] = []
    for kind, ((need, _, _), of_policy) in enumerate(programs.items()):
        pairs = np.flatnonzero(types.t == of_policy[0])
        steps = np.zeros(len(own), dtype=int)
        steps[types.k[pairs]] = types.steps[pairs]
        for L in _lengths(steps):
            found = [
                (int(J) * L, L * (types.t0[t] + J * types.slot_s[t]) + instance.cost.compile_s)
                for t in of_policy
                for J in _slots(int(types.limit[t]))
            ]
            least = np.inf
            kept = []
            for size, time in sorted(found, key=lambda item: (-item[0], item[1])):
                if time < least:
                    least = time
                    kept.append((len(rows), size, time))
            kept = [trial for trial in kept if trial[2] <= room]
            if kept:
                trials += kept
                rows.append(np.where(steps <= L, steps, 0))
                kinds.append(kind)
                tight.append((buckets == need.bucket, lengths == need.S))
    row, capacity, seconds = np.array(trials, dtype=float).reshape(-1, 3).T
    return Table(
        degree,
        np.array(rows).reshape(-1, len(own)),
        np.array(kinds),
        np.array(tight, dtype=bool).reshape(-1, 2, len(own)).transpose(1, 0, 2),
        row.astype(int),
        capacity.astype(int),
        seconds,
    )


def _lengths(steps: np.ndarray) -> list[int]:
    """Return the micro-steps a pack may last: multiples of its jobs' own, near ones once."""
    out: list[int] = []
    for L in sorted({int(w * s) for s in set(steps[steps > 0]) for w in range(1, WAVES + 1)}):
        if not out or 1.02 * out[-1] < L:
            out.append(L)
    return out


def _slots(limit: int) -> list[int]:
    """Return the numbers of slots to try: all of few, every fourth of many, the most that fit."""
    return [J for J in range(1, limit + 1) if J <= 24 or J % 4 == 0 or limit == J]


class State(NamedTuple):
    """Hold a group half filled: seconds × devices lost, seconds used, jobs left of each class, packs."""

    lost: float
    used: float
    left: np.ndarray
    packs: tuple[Choice, ...]


class Filler:
    """Fill one group with some of the jobs left, within C, at given prices."""

    def __init__(
        self, instance: Instance, table: Table, prices: np.ndarray, left: np.ndarray, C: float
    ) -> None:
        self.instance, self.degree, self.prices, self.all_left = instance, table.degree, prices, left
        self.room = C - instance.load_seconds(table.degree)
        self.live = np.flatnonzero(left)
        used = table.tight[:, :, self.live].any(axis=2).all(axis=0)
        self.kind = table.kind[used]
        trials = used[table.row] & (table.seconds <= self.room)
        self.row = (np.cumsum(used) - 1)[table.row[trials]]
        self.capacity, self.seconds = table.capacity[trials], table.seconds[trials]
        scoring = np.array([instance.eval_seconds(table.degree, int(k)) for k in self.live])
        worth = prices[self.live] - table.degree * scoring
        steps = table.steps[np.ix_(used, self.live)]
        density = np.where(steps > 0, worth / np.maximum(steps, 1), -np.inf)
        self.order = np.argsort(-density, axis=1, kind="stable")
        steps = np.take_along_axis(steps, self.order, 1)
        self.member, self.steps = steps > 0, np.maximum(steps, 1)
        self.worth = np.where(self.member, worth[self.order], 0.0)

    def fill(self) -> tuple[float, State] | None:
        """Return the packs of least loss and that loss, idle time included; None where no job fits."""
        states = [State(0.0, 0.0, self.all_left[self.live], ())]
        best: tuple[float, State] | None = None
        for depth in count():
            if not states:
                break
            found: dict[bytes, State] = {}
            for state in states:
                for new in self.extend(state):
                    key = new.left.tobytes()
                    if key not in found or new.lost < found[key].lost:
                        found[key] = new
            for new in found.values():
                total = new.lost + self.degree * (self.room - new.used)
                if best is None or total < best[0]:
                    best = (total, new)
            states = sorted(found.values(), key=lambda state: state.lost / state.used)
            states = states[: BEAM if depth < DEEP else 1]
        if best is None:
            return None
        left = self.all_left.copy()
        left[self.live] = best[1].left
        return best[0], best[1]._replace(left=left)

    def extend(self, state: State) -> list[State]:
        """Return the state with one pack more: the one that fills it best, and those that lose least a second.

        Every trial takes the jobs that are worth most a micro-step, up to its capacity.
        """
        room = self.room - state.used
        here = np.flatnonzero(self.seconds <= room)
        if not len(here):
            return []
        row, capacity, seconds = self.row[here], self.capacity[here], self.seconds[here]
        jobs = np.where(self.member, state.left[self.order], 0)
        R, K = jobs.shape
        work, value = np.zeros((R, K + 1), dtype=np.int64), np.zeros((R, K + 1))
        np.cumsum(jobs * self.steps, axis=1, out=work[:, 1:])
        np.cumsum(jobs * self.worth, axis=1, out=value[:, 1:])
        stride = int(work[:, -1].max()) + int(capacity.max()) + 1
        rising = (work + stride * np.arange(R)[:, None]).ravel()
        whole = np.searchsorted(rising, capacity + stride * row, side="right") - 1 - row * (K + 1)
        last = np.minimum(whole, K - 1)
        part = np.where(whole < K, (capacity - work[row, whole]) // self.steps[row, last], 0)
        part = np.minimum(part, jobs[row, last])
        worth = value[row, whole] + part * self.worth[row, last]
        lost = np.where(worth > 0, self.degree * seconds - worth, np.inf)
        out: list[State] = []
        kinds: set[int] = set()
        tried: set[bytes] = set()
        rate = lost / seconds
        worst = np.partition(rate, 12 * BRANCH)[12 * BRANCH] if len(rate) > 12 * BRANCH else np.inf
        few = np.flatnonzero(rate <= worst)
        first = few[np.argsort(rate[few], kind="stable")][: 12 * BRANCH]
        for c in (int(np.argmin(lost - self.degree * seconds)), *map(int, first)):
            kind = int(self.kind[row[c]])
            if kind in kinds or not np.isfinite(rate[c]):
                continue
            taken = np.zeros(K, dtype=int)
            at = self.order[row[c], : whole[c] + 1]
            taken[at] = jobs[row[c], : whole[c] + 1]
            if whole[c] < K:
                taken[at[-1]] = part[c]
            if taken.tobytes() not in tried:
                tried.add(taken.tobytes())
                kinds.add(kind)
                out += self._with(state, taken, room)
            if len(kinds) > BRANCH:
                break
        return out

    def _with(self, state: State, taken: np.ndarray, room: float) -> list[State]:
        """Return the state with a pack of some jobs, timed exactly, or nothing where it is too long."""
        counts = tuple((int(self.live[k]), int(taken[k])) for k in np.flatnonzero(taken))
        pack = choose_pack(self.instance, counts, self.degree)
        if pack is None or (seconds := pack.run_s + self.instance.cost.compile_s) > room:
            return []
        lost = state.lost + self.degree * seconds - float(self.prices[self.live] @ taken)
        return [State(lost, state.used + seconds, state.left - taken, (*state.packs, pack))]


Tables = dict[int, Table]


def make_tables(instance: Instance, types: Types, C: float) -> Tables:
    """List the packs of every degree that end within C."""
    return {d: make_table(instance, types, d, C - instance.load_seconds(d)) for d in instance.degrees}


def _group(instance: Instance, degree: int, state: State) -> Group:
    return Group(degree, state.packs, group_seconds(instance, list(state.packs)))


def fill(
    instance: Instance, tables: Tables, prices: np.ndarray, jobs: np.ndarray, pattern: list[int], C: float
) -> Solution | None:
    """Return groups of the pattern's degrees filled in turn with all of some jobs; None where many are left."""
    groups: Solution = []
    for d in pattern:
        found = Filler(instance, tables[d], prices, jobs, C).fill() if jobs.any() else None
        if found is not None:
            groups.append(_group(instance, d, found[1]))
            jobs = found[1].left
    return complete(instance, groups, jobs)


def dive(instance: Instance, tables: Tables, prices: np.ndarray, C: float) -> Solution | None:
    """Return groups filled one by one for C, the degree of each that loses least a device; None where many jobs
    are left.

    A group is repeated while there are jobs for twice as many. The last jobs go where they cost least, C or not.
    """
    left = np.array([n for _, n in instance.counts])
    free, solution = instance.usable, []
    while left.any() and free:
        best: tuple[float, int, State] | None = None
        for d, table in tables.items():
            found = Filler(instance, table, prices, left, C).fill() if d <= free else None
            if found and (best is None or found[0] / d < best[0]):
                best = (found[0] / d, d, found[1])
        if best is None:
            break
        _, d, state = best
        taken = left - state.left
        used = taken > 0
        times = max(1, min(int((left[used] // taken[used]).min()) // 2, free // d // 16))
        solution += [_group(instance, d, state)] * times
        left = left - times * taken
        free -= times * d
    return complete(instance, solution, left)


def complete(instance: Instance, groups: Solution, left: np.ndarray) -> Solution | None:
    """Put the jobs left where their groups then end earliest; None where they are many or one fits nowhere."""
    if left.sum() > min(max(2 * len(groups), 4), MOST_LEFT):
        return None
    groups = list(groups)
    for k, n in enumerate(left):
        for _ in range(n):
            if not insert(instance, groups, k):
                return None
    return groups
