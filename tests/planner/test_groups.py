"""Groups and lines: a line in which a class comes twice loses no job."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from planner.devices import DEVICES, devices
from planner.greedy import Line, cut
from planner.groups import Place, split_group
from planner.instance import Instance
from planner.pack import choose_pack, merge_counts
from planner.search import improve
from planner.time import cost_model
from tests.planner.problems import TINY, instance, job


def test_a_pack_of_unequal_jobs_takes_the_best_of_all_its_programs():
    """Against every m, policy and number of slots, each job in a slot by exhaustive search."""
    for seed in range(8):
        rng = Random(seed)
        jobs = [job(i, rng.choice((8, 64)), rng.choice((2, 4, 8)), 0, rng.randint(1, 5)) for i in range(4)]
        table, where = cost_model(DEVICES["A100-40GB"]), devices("2xA100-40GB")
        problem = Instance(jobs, TINY, where, "bf16", replace(table, step_s=rng.choice((0.0, 0.1, 1.0))))
        need, degree = problem.need(problem.counts), problem.degrees[0]
        times = []
        for m, policy in product([m for m in range(1, 9) if need.divisor % m == 0], problem.policies):
            cost = problem.step_cost(degree, policy, need)
            slot_s = cost.c * m * need.S + (cost.a0 + cost.a1 * m * need.S) * need.bucket
            steps = [problem.steps(m)[k] for k, n in problem.counts for _ in range(n)]
            for J in range(1, min(4, problem.slot_limit(degree, m, policy, need)) + 1):
                lengths = [
                    max(sum(s for s, slot in zip(steps, way, strict=True) if slot == j) for j in range(J))
                    for way in product(range(J), repeat=len(steps))
                ]
                times.append(min(lengths) * (cost.t0 + J * slot_s))
        scoring = sum(n * problem.eval_seconds(degree, k) for k, n in problem.counts)
        assert choose_pack(problem, problem.counts, degree).run_s == pytest.approx(min(times) + scoring)


def test_a_class_that_comes_twice_in_a_line_is_one_class_in_its_pack():
    problem = instance([job(i, 16, 4, 1) for i in range(8)] + [job(10, 8, 4, 1)], "2xA100-40GB")
    (a, n), (b, _) = sorted(problem.counts, key=lambda item: -item[1])
    line = ((a, 3), (b, 1), (a, n - 3))
    group = split_group(problem, line, 1)
    assert merge_counts(*(pack.counts for pack in group.packs)) == problem.counts
    assert all(len({k for k, _ in pack.counts}) == len(pack.counts) for pack in group.packs)
    solution = cut(Line(problem, line), (Place(1), Place(1)), 1e9)
    found = improve(problem, solution, 300)
    assert merge_counts(*(pack.counts for g in found for pack in g.packs)) == problem.counts
