"""Lower bounds against exact optima and closed forms."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planner import JobSpec, Options, check_plan, decoder_shape, make_plan
from planner.config_lp import ConfigurationLP, make_types
from planner.exact import exact
from planner.group_lp import CELLS, TOP, Groups, Master, _knapsack, group_bound
from planner.groups import makespan
from planner.ours import bounds
from planner.trials import Ranking
from tests.planner.problems import TINY, cluster, instance, job


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
    bound, kind, *_ = bounds(problem)
    assert 0 < bound <= makespan(exact(problem)) * (1 + 1e-9)
    assert kind in ("longest", "lp", "pigeonhole", "groups")


def test_one_job_is_bound_by_itself():
    problem = instance([job(0)], "8xA100-40GB")
    bound, kind, *_ = bounds(problem)
    assert kind == "longest" and bound == pytest.approx(makespan(exact(problem)), rel=1e-6)


def test_a_pack_may_have_its_mean_length_and_its_longest_row_from_two_jobs():
    jobs = [JobSpec("a", 16, 4, 300, 100.0, 1000, "a"), JobSpec("b", 16, 4, 300, 104.0, 112, "b")]
    problem, on = instance(jobs, "1xA100-40GB"), cluster(1)
    (group,) = exact(problem)
    assert len(group.packs) == 1 and bounds(problem).seconds <= group.seconds
    plan = make_plan(jobs, TINY, on, options=Options(baselines=False))
    assert check_plan(plan, jobs, TINY, on, problem.cost) == []
    (fault,) = check_plan(replace(plan, lower_bound_s=group.seconds), jobs, TINY, on, problem.cost)
    assert "does not hold" in fault


BIG = decoder_shape("Qwen2.5-32B", 64, 5120, 27648, 40, 8, 128, 152_064)
LONG = [JobSpec(f"long-{i}", (32, 64)[i % 2], (2, 4)[i % 2], 2000, 700.0, 6144, "long") for i in range(30)]
SHORT = [JobSpec(f"short-{i}", 8, 4, 900, 90.0, 128, "short", eval_tokens=9_000) for i in range(4)]


def test_groups_of_two_never_use_three_devices():
    """Of three H100s two hold the long jobs, the third none of them: as many as if there were but two."""
    three, two = instance(LONG + SHORT, "3xH100", BIG), instance(LONG, "2xH100", BIG)
    assert (three.degrees, two.degrees) == ((1, 2), (2,))
    bound, least = bounds(three), ConfigurationLP(two, make_types(two)).bound(1.0)
    assert bound.kind == "lp" and bound.seconds >= least * (1 - 1e-3)
    plan = make_plan(LONG + SHORT, BIG, three.devices, options=Options(baselines=False))
    assert bound.seconds <= plan.makespan_s < 1.05 * bound.seconds
    assert check_plan(plan, LONG + SHORT, BIG, three.devices, three.cost) == []


@pytest.mark.parametrize("seed", range(8))
def test_no_optimum_of_groups_that_do_not_use_all_devices_is_below_the_bound(seed):
    rng = random.Random(seed)
    jobs = rng.sample(LONG, rng.randint(1, 3)) + SHORT[: rng.randint(1, 3)]
    for count in (3, 5, 7):
        problem = instance(jobs, f"{count}xH100", BIG)
        best = makespan(exact(problem))
        types = make_types(problem)
        assert ConfigurationLP(problem, types).bound(0.5 * best) <= best * (1 + 1e-9)


def test_what_groups_cost_adds_up_to_all_devices():
    """At the duals: machine time is worth as much in the groups there can be as on all devices together."""
    problem = instance(LONG + SHORT, "7xH100", BIG)
    types = make_types(problem)
    lp = ConfigurationLP(problem, types)
    answer = lp.solve(1.05 * lp.bound(1.0))
    rents = answer.rents
    assert rents[4] / 4 >= rents[2] / 2 >= rents[1] and rents[2] > 2 * rents[1]
    whole = rents[4] + rents[2] + rents[1]  # 4 + 2 + 1 devices
    assert whole == pytest.approx(7, rel=1e-6)


def test_equal_jobs_one_more_than_devices_are_bound_by_the_pigeonhole():
    """Five jobs, four devices that cannot join: some device runs two jobs, each with a token cost of its own."""
    jobs = [job(i, 16, 1, 1) for i in range(5)]
    problem = instance(jobs, "4xA100-40GB")
    problem.__dict__["degrees"] = (1,)
    bound, kind, *_ = bounds(problem)
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

    bound = bounds(problem)
    solution, _, _ = ours(problem, bound, Effort(4, 400))
    assert makespan(solution) / bound.seconds < 1.03


UNEVEN = [job(i, (8, 64, 128)[i % 3], (2, 4, 4)[i % 3], 1, 1 + i % 2, 10_000 * (i % 2)) for i in range(7)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=7, max_size=7), st.sampled_from((1, 2, 3)))
def test_whatever_the_prices_no_optimum_is_below_what_they_rule_out(prices, count):
    problem = instance(UNEVEN, f"{count}xA100-40GB")
    best = makespan(exact(problem))
    for low in (0.8 * best, best):
        bound, _ = group_bound(problem, make_types(problem), low, np.array(prices[: len(problem.classes)]), 1)
        assert bound <= best * (1 + 1e-9)


def test_a_bound_claims_no_more_than_the_longest_packs_listed():
    """From far below the optimum, all that is known is that no listed pack earns enough: unlisted ones are longer."""
    problem = instance([job(i, 64, 1) for i in range(2)], "1xA100-40GB")
    for low in (1.0, makespan(exact(problem)) / 2):
        assert group_bound(problem, make_types(problem), low, np.ones(1), 40)[0] <= TOP * low


def test_a_degree_whose_jobs_have_no_price_never_earns_its_share():
    problem = instance([job(0, 8), job(1, 64)], "1xA100-40GB")
    for top in (1.0, 1.2 * makespan(exact(problem))):  # without packs, and with some
        group = Groups(problem, make_types(problem), 1, top)
        assert (group.table is None) == (top == 1.0)
        assert group.offer(np.zeros(2), 1.0, np.inf) == np.inf


def test_groups_that_hold_whole_jobs_bound_as_they_can_be_counted():
    """Five equal jobs on four devices that cannot join: some device runs two, side by side or in turn."""
    problem = instance([job(i, 16, 1, 1) for i in range(5)], "4xA100-40GB")
    problem.__dict__["degrees"] = (1,)
    bound, _ = group_bound(problem, make_types(problem), 80.0, np.ones(1), 40)
    best = makespan(exact(problem))
    assert 0.995 * best <= bound <= best


def test_with_better_prices_the_bound_comes_within_half_a_percent_of_the_optimum():
    problem = instance([job(i, (8, 64)[i % 2], (2, 4)[i % 3 == 0], 1) for i in range(9)], "4xA100-40GB")
    bound = bounds(problem)
    assert bound.kind == "groups"
    assert makespan(exact(problem)) <= 1.005 * bound.seconds


def test_a_knapsack_earns_the_most_of_all_sets_of_packs():
    cells, worth = [3, 4, 7, 12], [2.0, 3.5, 6.5, 11.4]
    earned, needed = _knapsack(np.array(cells), np.array(worth))
    for room in range(31):
        ways = product(*(range(room // c + 1) for c in cells))
        best = max(
            sum(n * w for n, w in zip(way, worth, strict=True))
            for way in ways
            if sum(n * c for n, c in zip(way, cells, strict=True)) <= room
        )
        assert earned[room] == pytest.approx(best)
    assert list(needed) == [0, 1, 2, 3] and len(earned) == CELLS + 1
    assert list(_knapsack(np.array([2, 4]), np.array([2.0, 4.0]))[1]) == [0], "two short packs do as well"


def test_a_pack_filled_with_a_cut_job_is_worth_no_less_than_with_any_whole_jobs():
    rng = np.random.default_rng(0)
    for _ in range(40):
        steps, worth, jobs = rng.integers(2, 9, (1, 4)), rng.uniform(0.5, 2.0, 4), rng.integers(1, 4, 4)
        capacity = int(rng.integers(5, 30))
        ways = [np.array(way) for way in product(*(range(n + 1) for n in jobs))]
        most = max(float(way @ worth) for way in ways if way @ steps[0] <= capacity)
        row, size = np.array([0]), np.array([capacity])
        ranking = Ranking(steps, worth)
        cut, whole = (
            ranking.best(jobs[None], row, row, size, cut=True),
            ranking.best(jobs[None], row, row, size),
        )
        assert whole.worth[0] <= most + 1e-9 and most <= cut.worth[0] + 1e-9
        assert cut.taken(0) @ steps[0] == pytest.approx(min(capacity, int(jobs @ steps[0])))
        assert whole.taken(0) @ worth == pytest.approx(whole.worth[0])


def test_the_linear_program_over_groups_goes_on_as_if_begun_anew(capfd):
    """Every time its devices and duals are an optimum's, by scipy's solver and weak duality; it prints nothing."""
    rng = np.random.default_rng(0)
    n, penalty = np.array([3.0, 5.0, 2.0]), np.array([4.0, 3.0, 5.0])
    master, columns, costs = Master(n, penalty), [*np.eye(3)], [*penalty]
    for _ in range(6):
        degree, groups = int(rng.choice((1, 2, 4))), list(rng.integers(0, 4, (3, 3)))
        master.add(degree, groups)
        columns, costs = [*columns, *groups], [*costs, *(3 * [degree])]
        devices, duals = master.solve()
        best = linprog(costs, A_ub=-np.array(columns).T, b_ub=-n)
        assert master.columns == len(columns) and devices == pytest.approx(best.fun)
        assert (
            n @ duals == pytest.approx(devices)
            and (np.array(columns) @ duals <= np.array(costs) + 1e-9).all()
        )
    assert capfd.readouterr().out == ""


def test_the_checker_proves_a_bound_by_its_prices_and_by_no_others():
    jobs, on = [job(i, (8, 64, 128)[i % 3], (2, 4)[i % 2], 1) for i in range(14)], cluster(3)
    plan = make_plan(jobs, TINY, on, options=Options(baselines=False))
    cost = instance(jobs, "3xA100-40GB").cost
    assert plan.bound == "groups" and plan.prices.keys() == {j.job_id for j in jobs}
    assert check_plan(plan, jobs, TINY, on, cost) == []
    for prices in ({}, dict.fromkeys(plan.prices, 1.0)):
        (fault,) = check_plan(replace(plan, prices=prices), jobs, TINY, on, cost)
        assert "does not hold" in fault
