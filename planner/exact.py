"""Exact search for few jobs: every split of the jobs into packs, of packs into groups, and of devices into
groups.

A state is a number of jobs of each class. T_d(s) is the least time of one group of degree d for the jobs s, over all
ways to part them into packs. All jobs end within C if D(all) ≤ G devices, where D(s) = min over r ⊆ s of
d(r) + D(s − r) and d(r) is the least degree with T_d(r) ≤ C. The least makespan is some T_d(s), found by bisection.
A part always holds a job of the state's first class, since the parts come in no order. Devices of several types share
the jobs: of every state, some type runs a part, and the other types the rest.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from planner.groups import Group, Solution
from planner.instance import Counts, Instance
from planner.pack import Choice, choose_pack, group_seconds

MOST_PAIRS = 2_500_000  # (state, part of it)
MOST_PACKS = 26_000  # states × degrees


def is_small(instance: Instance, pairs: int = MOST_PAIRS, packs: int = MOST_PACKS) -> bool:
    """Say whether exact search is affordable (thirteen different jobs are) and all devices are free."""
    if any(instance.busy):
        return False
    sizes = [n for _, n in instance.counts]
    states = prod(n + 1 for n in sizes) * len(instance.degrees)
    return states <= packs and prod((n + 1) * (n + 2) // 2 for n in sizes) <= pairs


def exact(instance: Instance) -> Solution:
    """Return a solution of least makespan among all plans with fixed groups."""
    return exact_shared([instance])[0]


def exact_shared(instances: Sequence[Instance]) -> list[Solution]:
    """Return solutions of least makespan for devices of several types, each an instance with all the jobs."""
    sizes = [n for _, n in instances[0].counts]
    weights = [prod(n + 1 for n in sizes[i + 1 :]) for i in range(len(sizes))]
    states = list(product(*(range(n + 1) for n in sizes)))
    parts = [_parts(state, weights) for state in states]
    times = [{d: _group_times(one, d, states, parts) for d in one.degrees} for one in instances]
    ends = np.unique([seconds[1:] for groups in times for seconds, _ in groups.values()])
    low, high = -1, int(np.searchsorted(ends, np.inf)) - 1  # within the last, all jobs end
    best: list[list[tuple[int, int]]] | None = None
    while best is None or high - low > 1:
        middle = (low + high) // 2 if best else high
        within = [_devices(groups, parts, float(ends[middle])) for groups in times]
        enough = [needed.devices <= one.devices.count for needed, one in zip(within, instances, strict=True)]
        dealt = _deal(enough, states, weights)
        if dealt is not None:
            best, high = [needed.groups(s) for needed, s in zip(within, dealt, strict=True)], middle
        else:
            low = middle
    return [
        [_group(one, d, part, groups[d][1], states) for d, part in found]
        for one, groups, found in zip(instances, times, best, strict=True)
    ]


def _deal(enough: list[np.ndarray], states: list[tuple[int, ...]], weights: list[int]) -> list[int] | None:
    """Return a state for each type, one for which its devices are `enough`, that are all the jobs together."""
    together = [enough[0]]  # the states that the first types do
    for more in enough[1:]:
        done = together[-1]
        last = len(together) + 1 == len(enough)  # of the last type, the state of all jobs alone matters
        here = [len(states) - 1] if last else range(len(states))
        found = np.zeros(len(states), dtype=bool)
        for s in here:
            inside = _parts(states[s], weights, whole=True)
            found[s] = (done[inside] & more[s - inside]).any()
        together.append(found)
    if not together[-1][-1]:
        return None
    out, s = [], len(states) - 1
    for done, more in zip(reversed(together[:-1]), reversed(enough[1:]), strict=True):
        inside = _parts(states[s], weights, whole=True)
        rest = int(inside[(done[inside] & more[s - inside]).argmax()])
        out.append(s - rest)
        s = rest
    return [s, *reversed(out)]


def _parts(state: tuple[int, ...], weights: list[int], whole: bool = False) -> np.ndarray:
    """Return the numbers of the states within a state, or of those alone that hold a job of its first class."""
    out = np.zeros(1, dtype=int)
    first = not whole
    for n, weight in zip(state, weights, strict=True):
        if n:
            out = (out[:, None] + weight * np.arange(first, n + 1)).ravel()
            first = False
    return out


def _counts(state: tuple[int, ...]) -> Counts:
    return tuple((k, n) for k, n in enumerate(state) if n)


def _group_times(
    instance: Instance, degree: int, states: list[tuple[int, ...]], parts: list[np.ndarray]
) -> tuple[np.ndarray, list[int]]:
    """Return T_d of every state, loading included, and one pack of its best split."""
    setup, load = instance.cost.compile_s, instance.load_seconds(degree)
    alone = np.full(len(states), np.inf)
    for s, state in enumerate(states):
        if s and (pack := choose_pack(instance, _counts(state), degree)) is not None:
            alone[s] = pack.run_s + setup
    best, first = alone.copy(), list(range(len(states)))
    best[0] = 0.0
    for s in range(1, len(states)):
        value = alone[parts[s]] + best[s - parts[s]]
        at = int(value.argmin())
        if value[at] < best[s]:
            best[s], first[s] = float(value[at]), int(parts[s][at])
    best[1:] += load
    return best, first


class _Needed(NamedTuple):
    """Hold, for every state, the fewest devices that run it within some time, and the first of their groups."""

    devices: np.ndarray
    degree: np.ndarray
    part: np.ndarray

    def groups(self, s: int) -> list[tuple[int, int]]:
        """Return the groups (degree, state) that run a state."""
        out = []
        while s:
            part = int(self.part[s])
            out.append((int(self.degree[part]), part))
            s -= part
        return out


def _devices(groups: dict[int, tuple[np.ndarray, list[int]]], parts: list[np.ndarray], C: float) -> _Needed:
    """Return the devices that states need to end within C."""
    n = len(parts)
    least = np.full(n, np.inf)  # the smallest group that runs a state within C
    for d in sorted(groups, reverse=True):
        least[groups[d][0] <= C] = d
    needed, part = np.zeros(n), np.zeros(n, dtype=int)
    for s in range(1, n):
        value = least[parts[s]] + needed[s - parts[s]]
        at = int(value.argmin())
        needed[s], part[s] = value[at], parts[s][at]
    return _Needed(needed, least, part)


def _group(
    instance: Instance, degree: int, state: int, first: list[int], states: list[tuple[int, ...]]
) -> Group:
    packs: list[Choice] = []
    while state:
        pack = choose_pack(instance, _counts(states[first[state]]), degree)
        assert pack is not None
        packs.append(pack)
        state -= first[state]
    return Group(degree, tuple(packs), group_seconds(instance, packs))
