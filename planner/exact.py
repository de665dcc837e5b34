"""Exact search for few jobs: every split of the jobs into packs, of packs into groups, and of devices into
groups.

A state is a number of jobs of each class. T_d(s) is the least time of one group of degree d for the jobs s,
over all ways to part them into packs; f_g(s) = min over d ≤ g and r ⊆ s of max(T_d(r), f_{g−d}(s − r)).
"""

from itertools import product
from math import prod

import numpy as np

from planner.groups import Group, Solution
from planner.instance import Counts, Instance
from planner.pack import Choice, choose_pack, group_seconds

MOST_PAIRS = 60_000  # (state, part of it)
MOST_STEPS = 40_000  # states × devices × degrees


def is_small(instance: Instance) -> bool:
    """Say whether exact search is affordable (ten different jobs on three devices are)."""
    sizes = [n for _, n in instance.counts]
    states = prod(n + 1 for n in sizes)
    pairs = prod((n + 1) * (n + 2) // 2 for n in sizes)
    devices = min(instance.devices.count, instance.n_jobs * instance.degrees[-1])
    return pairs <= MOST_PAIRS and states * devices * len(instance.degrees) <= MOST_STEPS


def exact(instance: Instance) -> Solution:
    """Return a solution of least makespan among all plans with fixed groups."""
    sizes = [n for _, n in instance.counts]
    states = list(product(*(range(n + 1) for n in sizes)))
    weights = np.array([prod(n + 1 for n in sizes[i + 1 :]) for i in range(len(sizes))])
    parts = [np.array(list(product(*(range(n + 1) for n in state)))) @ weights for state in states]
    n_states, G = len(states), min(instance.devices.count, instance.n_jobs * instance.degrees[-1])
    times, splits = {}, {}
    for d in instance.degrees:
        times[d], splits[d] = _group_times(instance, d, states, parts)
    f = np.full((G + 1, n_states), np.inf)
    f[:, 0] = 0.0
    how: list[list[tuple[int, int]]] = [[(0, 0)] * n_states for _ in range(G + 1)]
    for g in range(1, G + 1):
        for s in range(1, n_states):
            f[g, s], how[g][s] = f[g - 1, s], how[g - 1][s]
            for d in instance.degrees:
                if d > g:
                    break
                value = np.maximum(times[d][parts[s]], f[g - d, s - parts[s]])
                at = int(value.argmin())
                if value[at] < f[g, s]:
                    f[g, s], how[g][s] = float(value[at]), (d, int(parts[s][at]))
    solution: Solution = []
    g, s = G, n_states - 1
    while s:
        while f[g - 1, s] == f[g, s]:
            g -= 1
        d, part = how[g][s]
        if part:
            solution.append(_group(instance, d, part, splits[d], states))
        g, s = g - d, s - part
    return solution


def _counts(state: tuple[int, ...]) -> Counts:
    return tuple((k, n) for k, n in enumerate(state) if n)


def _group_times(
    instance: Instance, degree: int, states: list[tuple[int, ...]], parts: list[np.ndarray]
) -> tuple[np.ndarray, list[int]]:
    """Return T_d of every state, loading included, and the first pack of its best split."""
    setup, load = instance.cost.compile_s, instance.load_seconds(degree)
    alone = np.full(len(states), np.inf)
    for s, state in enumerate(states):
        if s and (pack := choose_pack(instance, _counts(state), degree)) is not None:
            alone[s] = pack.run_s + setup
    best, first = alone.copy(), list(range(len(states)))
    best[0] = 0.0
    for s in range(1, len(states)):
        value = alone[parts[s]] + best[s - parts[s]]
        value[parts[s] == 0] = np.inf
        at = int(value.argmin())
        if value[at] < best[s]:
            best[s], first[s] = float(value[at]), int(parts[s][at])
    best[1:] += load
    return best, first


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
