"""The published method: knapsack against MILP, ratio against enumeration, dynamic programming against recursion."""

import random
from itertools import product

import pytest

from planner.knapsack import Items, best_ratio, bounded_knapsack, milp_knapsack
from planner.published import Published
from tests.planner.problems import QWEN, TINY, instance, job


def random_items(rng: random.Random, kinds: int) -> Items:
    return Items(
        tuple(float(rng.choice((8, 16, 32, 64, 128))) for _ in range(kinds)),
        tuple(rng.uniform(0.001, 0.1) for _ in range(kinds)),
        tuple(rng.uniform(1e8, 9e9) for _ in range(kinds)),
        tuple(rng.randint(0, 4) for _ in range(kinds)),
    )


def brute_ratio(items: Items, fixed: float, room: float) -> float:
    best = 0.0
    for x in product(*(range(n + 1) for n in items.copies)):
        if sum(s * n for s, n in zip(items.size, x, strict=True)) <= room:
            seconds = fixed + sum(w * n for w, n in zip(items.seconds, x, strict=True))
            best = max(best, sum(v * n for v, n in zip(items.value, x, strict=True)) / seconds)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_knapsack_equals_the_milp(seed):
    rng = random.Random(seed)
    items = random_items(rng, rng.randint(1, 9))
    room = rng.uniform(1e9, 3e10)
    gain = tuple(rng.uniform(-5, 100) for _ in items.value)
    milp = milp_knapsack(len(gain))

    def total(x):
        return sum(g * n for g, n in zip(gain, x, strict=True))

    own, theirs = bounded_knapsack(gain, items, room), milp(gain, items, room)
    assert total(own) == pytest.approx(total(theirs), rel=1e-6)
    assert sum(s * n for s, n in zip(items.size, own, strict=True)) <= room * (1 + 1e-9)
    assert all(0 <= n <= c for n, c in zip(own, items.copies, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_dinkelbach_finds_the_best_ratio(seed):
    rng = random.Random(100 + seed)
    items = random_items(rng, rng.randint(1, 5))
    fixed, room = rng.uniform(0.01, 0.3), rng.uniform(1e9, 3e10)
    x, ratio = best_ratio(items, fixed, room)
    assert ratio == pytest.approx(brute_ratio(items, fixed, room), rel=1e-9)
    assert bool(ratio) == bool(sum(x))


@pytest.mark.parametrize("devices", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("native", (False, True))
def test_dtm_equals_the_literal_recursion(devices, native):
    jobs = [job(i, (8, 32, 128)[i % 3], (1, 4)[i % 2], 2) for i in range(18)]
    method = Published(instance(jobs, f"{devices}xA100-40GB", QWEN), native)
    assert method.dtm(devices, method.counts)[0] == pytest.approx(
        method.literal_dtm(devices, method.counts), rel=1e-12
    )


def test_the_job_planner_places_every_job_once():
    jobs = [job(i, (8, 32, 128)[i % 3], (1, 4)[i % 2], i % 3) for i in range(30)]
    problem = instance(jobs, "4xA100-40GB", TINY)
    makespan, placed = Published(problem).placed()
    taken: dict[int, int] = {}
    for item in placed:
        for k, n in item.choice.counts:
            taken[k] = taken.get(k, 0) + n
    assert tuple(sorted(taken.items())) == problem.counts
    assert makespan == pytest.approx(max(item.end_s for item in placed))
    assert Published(problem, native=True).schedule() > 0
