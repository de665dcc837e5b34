"""The configuration LP and the searches: what they may change and what they must keep."""

import numpy as np
import pytest

from planner.config_lp import degree_shares, lines, lp_bound, make_types, solve
from planner.greedy import greedy, patterns
from planner.groups import makespan
from planner.ours import Effort, bounds, ours
from planner.pack import choose_pack, merge_counts
from planner.recut import recut
from planner.search import improve
from tests.planner.problems import instance, job

JOBS = [job(i, 8 * 2 ** (i % 5), 2 ** (i % 4), i % 3, 1 + i % 3, 20_000 * (i % 2)) for i in range(36)]


@pytest.fixture(scope="module")
def problem():
    return instance(JOBS, "5xA100-40GB")


def jobs_of(solution):
    return merge_counts(*(pack.counts for group in solution for pack in group.packs))


def test_the_lp_covers_every_class_and_falls_with_time(problem):
    types = make_types(problem)
    low = lp_bound(problem, types, 1.0)
    values = [solve(problem, types, C) for C in (low, 1.2 * low, 2 * low)]
    assert [v.machine_s for v in values] == sorted((v.machine_s for v in values), reverse=True)
    per_class = np.zeros(len(problem.classes))
    np.add.at(per_class, types.k[values[0].pairs], values[0].jobs)
    assert per_class == pytest.approx([n for _, n in problem.counts], rel=1e-6)
    assert (values[0].prices > 0).all(), "every job costs machine time"


def test_whole_programs_cost_no_less(problem):
    types = make_types(problem)
    C = 1.1 * lp_bound(problem, types, 1.0)
    assert solve(problem, types, C, nodes=50).machine_s >= solve(problem, types, C).machine_s * (1 - 1e-6)


def test_lines_hold_every_job_once_and_shares_add_up(problem):
    types = make_types(problem)
    answer = solve(problem, types, 1.1 * lp_bound(problem, types, 1.0))
    for line in lines(problem, types, answer):
        assert merge_counts(*((item,) for item in line)) == problem.counts
    shares = degree_shares(problem, types, answer)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(sum(pattern) <= 5 for pattern in patterns(problem, shares))


def test_searches_keep_every_job_and_never_lose_time(problem):
    start = min(greedy(problem).values(), key=makespan)
    assert jobs_of(start) == problem.counts
    for found in (
        recut(problem, start, 20),
        improve(problem, start, 600),
        improve(problem, start, 600, seed=1),
    ):
        assert jobs_of(found) == problem.counts
        assert makespan(found) <= makespan(start)
        assert sum(group.degree for group in found) <= 5
    assert improve(problem, start, 300) == improve(problem, start, 300)


def test_more_effort_comes_closer(problem):
    bound, _ = bounds(problem)
    little = makespan(ours(problem, bound, Effort(0, 0))[0])
    more = makespan(ours(problem, bound, Effort(10, 900, milp_nodes=5))[0])
    assert bound <= more <= little


def test_a_pack_takes_the_best_of_all_its_programs(problem):
    """Every m, policy and J by hand, for equal jobs."""
    counts = ((problem.counts[0][0], problem.counts[0][1]),)
    need, (k, n) = problem.need(counts), counts[0]
    best = float("inf")
    for m in range(1, problem.classes[k].batch_size + 1):
        if problem.classes[k].batch_size % m:
            continue
        for policy in problem.policies:
            cost = problem.step_cost(1, policy, need)
            for J in range(1, min(n, problem.slot_limit(1, m, policy, need)) + 1):
                steps = -(-n // J) * -(-problem.classes[k].rows // m)
                best = min(best, steps * cost.seconds(J, m, need.S, need.bucket))
    chosen = choose_pack(problem, counts, 1)
    assert chosen.run_s == pytest.approx(best + n * problem.eval_seconds(1, k))
