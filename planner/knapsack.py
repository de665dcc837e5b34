"""F(D, K) of the paper: the pack of greatest Σ value / T within memory, as a ratio (Dinkelbach) over
knapsacks.

T = fixed + Σ_k w_k x_k is affine in the numbers x_k of identical jobs, so the ratio's maximum is the λ at
which max_x Σ (v_k − λ w_k) x_k − λ · fixed = 0; each Dinkelbach step solves one knapsack. The knapsack is
solved by cvxpy and HiGHS (one problem with parameters, as published) or exactly in plain Python.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Items(NamedTuple):
    """Hold one row a kind of identical jobs: value, seconds a step, bytes, and how many there are."""

    value: tuple[float, ...]
    seconds: tuple[float, ...]
    size: tuple[float, ...]
    copies: tuple[int, ...]


Knapsack = Callable[[tuple[float, ...], Items, float], tuple[int, ...]]


def bounded_knapsack(gain: tuple[float, ...], items: Items, room: float) -> tuple[int, ...]:
    """Return whole x ≤ copies of greatest Σ gain·x with Σ size·x ≤ room, exactly: dynamic programming over
    fronts.

    Kinds are taken by falling gain per byte. A front keeps the (size, gain) that no other beats in both, less
    those that cannot reach the best whole solution known even if the rest were filled fractionally.
    """
    order = sorted(
        (k for k in range(len(gain)) if gain[k] > 0 and items.copies[k] and items.size[k] <= room),
        key=lambda k: (-gain[k] / items.size[k], k),
    )
    known = _fill(gain, items, order, room)
    size, total = np.zeros(1), np.zeros(1)
    steps: list[
        tuple[np.ndarray, np.ndarray]
    ] = []  # per kind: of each front member, its parent and its copies
    for at, k in enumerate(order):
        n = np.arange(items.copies[k] + 1)
        sizes = (size[:, None] + n * items.size[k]).ravel()
        totals = (total[:, None] + n * gain[k]).ravel()
        parents = np.repeat(np.arange(len(size)), len(n))
        copies = np.tile(n, len(size))
        keep = sizes <= room * (1 + 1e-12)
        keep &= totals + _rest(gain, items, order[at + 1 :], room - sizes) >= known * (1 - 1e-12)
        sizes, totals, parents, copies = sizes[keep], totals[keep], parents[keep], copies[keep]
        rank = np.lexsort((-totals, sizes))
        sizes, totals, parents, copies = sizes[rank], totals[rank], parents[rank], copies[rank]
        front = np.concatenate([[True], totals[1:] > np.maximum.accumulate(totals)[:-1]])
        size, total = sizes[front], totals[front]
        steps.append((parents[front], copies[front]))
    x = [0] * len(gain)
    member = len(size) - 1  # of a front, the largest gains the most
    for k, (parents, copies) in zip(reversed(order), reversed(steps), strict=True):
        x[k] = int(copies[member])
        member = int(parents[member])
    return tuple(x)


def _fill(gain: tuple[float, ...], items: Items, order: list[int], room: float) -> float:
    """Return the gain of taking whole copies in order."""
    total = 0.0
    for k in order:
        n = min(items.copies[k], int(room / items.size[k]))
        total, room = total + n * gain[k], room - n * items.size[k]
    return total


def _rest(gain: tuple[float, ...], items: Items, order: list[int], room: np.ndarray) -> np.ndarray:
    """Return the most that some room can gain from kinds taken in order, the last one fractionally."""
    total, room = np.zeros(len(room)), np.maximum(room, 0.0)
    for k in order:
        n = np.minimum(items.copies[k], room / items.size[k])
        total, room = total + n * gain[k], room - n * items.size[k]
    return total


def milp_knapsack(n_kinds: int) -> Knapsack:
    """Return a solver of the same knapsack by cvxpy and HiGHS: one problem, its numbers are parameters."""
    import cvxpy as cp

    x = cp.Variable(n_kinds, integer=True)
    gain = cp.Parameter(n_kinds)
    share = cp.Parameter(n_kinds, nonneg=True)  # size / room
    most = cp.Parameter(n_kinds, nonneg=True)
    problem = cp.Problem(cp.Maximize(gain @ x), [x >= 0, x <= most, share @ x <= 1])

    def solve(gains: tuple[float, ...], items: Items, room: float) -> tuple[int, ...]:
        scale = max(abs(g) for g in gains) or 1.0
        gain.value = np.array(gains) / scale
        share.value = np.array(items.size) / room
        most.value = np.array(items.copies, dtype=float)
        problem.solve(
            solver=cp.HIGHS,
            parallel="off",
            mip_rel_gap=1e-9,
            mip_feasibility_tolerance=1e-9,
            log_to_console=False,
        )
        return tuple(round(v) for v in np.asarray(x.value))

    return solve


def best_ratio(
    items: Items, fixed: float, room: float, knapsack: Knapsack = bounded_knapsack
) -> tuple[tuple[int, ...], float]:
    """Return the numbers of jobs x of greatest Σ value·x / (fixed + Σ seconds·x), and that ratio
    (Dinkelbach).

    The ratio rises at every step and the steps end at the optimum, usually after three to five. No job that
    fits gives zeros and ratio 0.
    """
    ratio = 0.0
    best: tuple[int, ...] = (0,) * len(items.value)
    while True:
        gain = tuple(v - ratio * w for v, w in zip(items.value, items.seconds, strict=True))
        x = knapsack(gain, items, room)
        value = sum(v * n for v, n in zip(items.value, x, strict=True))
        seconds = fixed + sum(w * n for w, n in zip(items.seconds, x, strict=True))
        if value <= ratio * seconds * (1 + 1e-9):
            return best, ratio
        best, ratio = x, value / seconds
