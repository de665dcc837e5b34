"""Exact search against enumeration: every partition of the jobs into packs, every placing of packs on groups."""

import random
from collections import Counter

import pytest

from planner import Options, make_plan
from planner.exact import exact, is_small
from planner.groups import makespan
from planner.pack import choose_pack, lay_out
from tests.planner.problems import TINY, cluster, instance, job


def partitions(classes: list[int]) -> set[tuple]:
    """Return every way to part jobs into packs, jobs of one class being alike: sorted packs of sorted classes."""
    found: set[tuple] = {()}
    for k in classes:
        more = {tuple(sorted([*packs, (k,)])) for packs in found}
        for packs in found:
            for i, pack in enumerate(packs):
                grown = tuple(sorted((*pack, k)))
                more.add(tuple(sorted([*packs[:i], grown, *packs[i + 1 :]])))
        found = more
    return found


def enumerate_all(problem) -> float:
    """Return the least makespan by trying everything: packs of any subsets, groups of any degrees."""
    class_of = [k for k, n in problem.counts for _ in range(n)]
    best = float("inf")
    G = problem.devices.count
    layouts = {1: [(1,)], 2: [(1, 1), (2,)], 3: [(1, 1, 1), (2, 1)]}[G]
    for part in partitions(class_of):
        for degrees in layouts:
            degrees = [d for d in degrees if d in problem.degrees]
            times = [[choose_pack(problem, tuple(Counter(p).items()), d) for d in degrees] for p in part]

            def place(n: int, loads: tuple[float, ...], degrees=degrees, times=times) -> None:
                nonlocal best
                if max(loads, default=0.0) >= best:
                    return
                if n == len(times):
                    best = max(loads)
                    return
                for g, d in enumerate(degrees):
                    if times[n][g] is not None:
                        start = loads[g] or problem.load_seconds(d)
                        new = start + problem.cost.compile_s + times[n][g].run_s
                        place(n + 1, (*loads[:g], new, *loads[g + 1 :]))

            place(0, (0.0,) * len(degrees))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_enumeration(seed):
    rng = random.Random(seed)
    n, G = rng.randint(2, 6), rng.randint(1, 3)
    jobs = [
        job(i, rng.choice((8, 16, 64, 128)), rng.choice((1, 2, 4, 6)), rng.randrange(3), rng.randint(1, 3))
        for i in range(n)
    ]
    problem = instance(jobs, f"{G}xA100-40GB")
    assert is_small(problem)
    assert makespan(exact(problem)) == pytest.approx(enumerate_all(problem), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_ten_jobs_on_three_devices_are_planned_as_fast_as_enumeration_finds(seed):
    """Four kinds of jobs, of which two to four each, so that everything can be tried."""
    rng = random.Random(seed)
    kinds = [(rng.choice((8, 64, 128)), rng.choice((1, 2, 4)), rng.randrange(3), n) for n in (1, 2, 3, 1)]
    jobs = [job(i, *kinds[k]) for i, k in enumerate((0, 0, 0, 0, 1, 1, 2, 2, 3, 3))]
    plan = make_plan(jobs, TINY, cluster(3), options=Options(baselines=False))
    assert plan.method == "exact"
    assert plan.makespan_s == pytest.approx(enumerate_all(instance(jobs, "3xA100-40GB")), rel=1e-9)


def test_ten_different_jobs_on_three_devices_are_planned_exactly():
    rng = random.Random(5)
    jobs = [job(i, rng.choice((8, 16, 64)), rng.choice((1, 2, 4)), i % 3, 1 + i % 4) for i in range(10)]
    plan = make_plan(jobs, TINY, cluster(3), options=Options(baselines=False))
    assert plan.method == "exact"


@pytest.mark.parametrize("seed", range(20))
def test_few_jobs_are_laid_out_best(seed):
    """Against every placing of the jobs in slots."""
    from itertools import product

    rng = random.Random(seed)
    steps, J = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))], rng.randint(1, 3)
    best = min(
        max(sum(s for s, j in zip(steps, place, strict=True) if j == slot) for slot in range(J))
        for place in product(range(J), repeat=len(steps))
    )
    longest, slots = lay_out(steps, J)
    assert longest == best
    assert sorted(i for slot in slots for i in slot) == list(range(len(steps)))
    assert max(sum(steps[i] for i in slot) for slot in slots) == best
