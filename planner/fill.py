"""Fill device groups one after another with the packs that waste least, jobs being worth their prices in a linear
program: over programs, or over whole groups.

The machine time that a pack takes beyond its worth is lost, and so is the time for which a group idles. A beam search
chooses the packs of one group for the least loss; the next group is filled with what is left (a dive, as in column
generation for bin packing, with groups as columns).
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from planner.config_lp import Types
from planner.groups import Group, Place, Solution, insert, put, remember, unused
from planner.instance import Instance
from planner.pack import Choice, choose_pack, group_seconds
from planner.trials import Ranking, Table, make_table

BEAM = 4  # groups half filled that are kept at each depth
DEEP = 6  # packs of a group after which only one is kept
MOST_LEFT = 128  # jobs left over that are put in one by one, which is slow with many groups
BRANCH = 2  # packs tried on each, beside the one that fills it best


class State(NamedTuple):
    """Hold a group half filled: seconds × devices lost, seconds used, jobs left of each class, packs."""

    lost: float
    used: float
    left: np.ndarray
    packs: tuple[Choice, ...]


class Filler:
    """Fill one group with some of the jobs left, within C, at given prices; `beam` and `branch` set how widely."""

    def __init__(
        self,
        instance: Instance,
        table: Table,
        prices: np.ndarray,
        left: np.ndarray,
        C: float,
        beam: int = BEAM,
        branch: int = BRANCH,
    ) -> None:
        self.beam, self.branch = beam, branch
        self.instance, self.degree, self.all_left = instance, table.degree, left
        self.room = C - instance.load_seconds(table.degree)
        self.live = np.flatnonzero(left)
        used = table.tight[:, :, self.live].any(axis=2).all(axis=0)
        self.kind = table.kind[used]
        trials = used[table.row] & (table.seconds <= self.room)
        self.row = (np.cumsum(used) - 1)[table.row[trials]]
        self.capacity, self.seconds = table.capacity[trials], table.seconds[trials]
        scoring = np.array(instance.scoring(table.degree))[self.live]
        self.prices = prices[self.live]
        worth = self.prices - table.degree * scoring
        self.ranking = Ranking(table.steps[np.ix_(used, self.live)], worth)

    def fill(self) -> tuple[float, State] | None:
        """Return the packs of least loss and that loss, idle time included; None where no job fits."""
        states = [State(0.0, 0.0, self.all_left[self.live], ())]
        best: tuple[float, State] | None = None
        for depth in count():
            if not states:
                break
            found: dict[bytes, State] = {}
            for new in self.extend(states):
                key = new.left.tobytes()
                if key not in found or new.lost < found[key].lost:
                    found[key] = new
            for new in found.values():
                total = new.lost + self.degree * (self.room - new.used)
                if best is None or total < best[0]:
                    best = (total, new)
            states = sorted(found.values(), key=lambda state: state.lost / state.used)
            states = states[: self.beam if depth < DEEP else 1]
        if best is None:
            return None
        left = self.all_left.copy()
        left[self.live] = best[1].left
        return best[0], best[1]._replace(left=left)

    def extend(self, states: list[State]) -> list[State]:
        """Return each state with one pack more: the one that fills it best, and those that lose least a second.

        Every trial takes the jobs that are worth most a micro-step, up to its capacity.
        """
        rooms = [self.room - state.used for state in states]
        of_state, here = (self.seconds <= np.array(rooms)[:, None]).nonzero()
        if not len(here):
            return []
        seconds = self.seconds[here]
        left = np.array([state.left for state in states])
        best = self.ranking.best(left, of_state, self.row[here], self.capacity[here])
        idle = np.where(best.worth > 0, -best.worth, np.inf)  # what is lost, beyond the group's idling
        rate = self.degree + idle / seconds
        kinds, ends = self.kind[self.row[here]], np.searchsorted(of_state, range(len(states) + 1)).tolist()
        out: list[State] = []
        for state, room, a, b in zip(states, rooms, ends, ends[1:], strict=False):
            order = a + np.argsort(rate[a:b], kind="stable")[: 12 * self.branch]
            tried: set[int] = set()
            packs: set[bytes] = set()
            for c in (a + int(np.argmin(idle[a:b])), *order.tolist()) if a < b else ():
                kind = int(kinds[c])
                if kind in tried or idle[c] == np.inf:
                    continue
                taken = best.taken(c)
                if (key := taken.tobytes()) not in packs:
                    packs.add(key)
                    tried.add(kind)
                    out += self._with(state, taken, room)
                if len(tried) > self.branch:
                    break
        return out

    def _with(self, state: State, taken: np.ndarray, room: float) -> list[State]:
        """Return the state with a pack of some jobs, timed exactly, or nothing where it is too long."""
        used = taken.nonzero()[0]
        counts = tuple(zip(self.live[used].tolist(), taken[used].tolist(), strict=True))
        pack = choose_pack(self.instance, counts, self.degree)
        if pack is None or (seconds := pack.run_s + self.instance.cost.compile_s) > room:
            return []
        lost = state.lost + self.degree * seconds - float(self.prices @ taken)
        new = State(lost, state.used + seconds, state.left - taken, (*state.packs, pack))
        if self.instance.met is not None:
            remember(self.instance, _group(self.instance, self.degree, new))
        return [new]


Tables = dict[int, Table]
Prices = dict[
    int, np.ndarray
]  # degree -> what a job of each class is worth to such groups, in seconds × devices


def make_tables(instance: Instance, types: Types, C: float) -> Tables:
    """List the packs of every degree that end within C."""
    rooms = {d: C - instance.load_seconds(d) for d in instance.degrees}
    return {d: make_table(instance, types, d, room) for d, room in rooms.items()}


def _group(instance: Instance, degree: int, state: State) -> Group:
    return Group(degree, state.packs, group_seconds(instance, list(state.packs)))


def fill(
    instance: Instance,
    tables: Tables,
    prices: Prices,
    jobs: np.ndarray,
    pattern: Sequence[Place],
    C: float,
) -> Solution | None:
    """Return groups of the pattern filled in turn with all of some jobs; None where many are left."""
    groups: Solution = []
    for place in pattern:
        table, room = tables[place.degree], C - place.start
        found = Filler(instance, table, prices[place.degree], jobs, room).fill() if jobs.any() else None
        if found is not None:
            groups.append(put(_group(instance, place.degree, found[1]), place))
            jobs = found[1].left
    return complete(instance, groups, jobs)


def dive(
    instance: Instance, tables: Tables, prices: Prices, C: float, first: dict[int, float]
) -> Solution | None:
    """Return groups filled one by one for C, the degree of each that loses least a device; None where many jobs
    are left. `first` holds, and gets, what a degree lost a device when an earlier dive first tried it: not before
    others lose as much is it tried again.

    A group is repeated while there are jobs for twice as many. The last jobs go where they cost least, C or not. Where
    devices are busy, groups of the smallest degree are filled, those that are free first.
    """
    left = np.array([n for _, n in instance.counts])
    if instance.busy:
        return fill(instance, tables, prices, left, unused(instance, []), C)
    free, solution = instance.usable, []
    lost = dict.fromkeys(tables, 0.0) | first  # a device, when last tried; that only grows as jobs get fewer
    while left.any() and free:
        best: tuple[float, int, State] | None = None
        for d in sorted((d for d in tables if d <= free), key=lambda d: (lost[d], d)):
            if best is not None and best[0] <= lost[d]:
                break
            found = Filler(instance, tables[d], prices[d], left, C).fill()
            lost[d] = found[0] / d if found else np.inf
            if found:  # what fits nothing within this C may fit within another
                first.setdefault(d, lost[d])
            if found and (best is None or lost[d] < best[0]):
                best = (lost[d], d, found[1])
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
