"""Lower bounds against exact optima and closed forms."""

import random

import pytest

from planner.exact import exact
from planner.groups import makespan
from planner.ours import bounds
from tests.planner.problems import instance, job


@pytest.mark.parametrize("seed", range(10))
def test_no_optimum_is_below_the_bound(seed):
    rng = random.Random(seed)
    jobs = [
        job(
            i, rng.choice((8, 64, 128)), rng.choice((1, 2, 4, 6)), rng.randrange(3), rng.randint(1, 3), 10_000
        )
        for i in range(rng.randint(1, 6))
    ]
    problem = instance(jobs, f"{rng.randint(1, 3)}xA100-40GB")
    bound, kind = bounds(problem)
    assert 0 < bound <= makespan(exact(problem)) * (1 + 1e-9)
    assert kind in ("longest", "lp", "pigeonhole")


def test_one_job_is_bound_by_itself():
    problem = instance([job(0)], "8xA100-40GB")
    bound, kind = bounds(problem)
    assert kind == "longest" and bound == pytest.approx(makespan(exact(problem)), rel=1e-6)


def test_equal_jobs_one_more_than_devices_are_bound_by_the_pigeonhole():
    """Five jobs, four devices that cannot join: some device runs two jobs, each with a token cost of its own."""
    jobs = [job(i, 16, 1, 1) for i in range(5)]
    problem = instance(jobs, "4xA100-40GB")
    problem.__dict__["degrees"] = (1,)
    bound, kind = bounds(problem)
    need = problem.need(((0, 1),))
    cost = problem.step_cost(1, "dots", need)
    slot = cost.seconds(1, 1, need.S, need.bucket) - cost.t0
    pair = problem.load_seconds(1) + problem.cost.compile_s + 2500 * (cost.t0 + 2 * slot)
    assert kind == "pigeonhole"
    assert bound == pytest.approx(pair + 2 * problem.eval_seconds(1, 0), rel=0.02)
    assert bound <= makespan(exact(problem)) * (1 + 1e-9)


def test_many_equal_jobs_come_close_to_the_bound():
    problem = instance([job(i, 16, 4, 1) for i in range(160)], "4xA100-40GB")
    from planner.ours import Effort, ours

    bound, _ = bounds(problem)
    solution, _, _ = ours(problem, bound, Effort(4, 400))
    assert makespan(solution) / bound < 1.03
