"""Devices that are free only later: planning again while packs run."""

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Plan, PlanError, World, check_plan, cost_model, make_plan, simulate
from planner.exact import exact
from planner.groups import makespan
from planner.incumbent import repair
from planner.instance import Instance
from planner.ours import bounds
from planner.pack import choose_pack
from tests.planner.problems import TINY, cluster, instance, job, sweeps
from tests.planner.test_exact import partitions
from tests.planner.test_properties import QUICK, some

busy_devices = st.lists(st.sampled_from((0.0, 20.0, 90.0, 400.0)), min_size=1, max_size=5)


def busy_instance(jobs, busy) -> Instance:
    on = cluster(len(busy))
    return Instance(jobs, TINY, on, "bf16", cost_model(on.spec), busy=tuple(busy))


@some
@given(sweeps(), busy_devices)
def test_no_pack_starts_before_its_devices_are_free_and_the_simulator_agrees(jobs, busy):
    on = cluster(len(busy))
    plan = make_plan(jobs, TINY, on, options=QUICK, busy_until=busy)
    assert all(pack.start_s >= max(busy[device] for device in pack.devices) for pack in plan.packs)
    assert check_plan(plan, jobs, TINY, on, cost_model(on.spec)) == []
    assert Plan.from_json(plan.to_json()) == plan
    outcome = simulate(plan, {j.job_id: j for j in jobs}, World(refill=False))
    dated = {a.job_id: a.end_s for pack in plan.packs for a in pack.assign}
    assert outcome.ended == pytest.approx(dated, rel=1e-6)
    assert outcome.makespan_s == pytest.approx(plan.makespan_s, rel=1e-6)


@some
@given(sweeps(), sweeps(), busy_devices)
def test_planning_again_on_busy_devices_is_never_worse_than_the_old_plan_repaired(jobs, others, busy):
    on = cluster(len(busy))
    old = make_plan(jobs, TINY, on, options=QUICK)
    repaired = repair(busy_instance(others, busy), old.packs)
    new = make_plan(others, TINY, on, options=QUICK, incumbent=old.packs, busy_until=busy)
    assert repaired is None or new.makespan_s <= makespan(repaired) * (1 + 1e-9)


@some
@given(sweeps(), busy_devices, st.integers(0, 4))
def test_the_bound_never_rises_with_a_device_free_sooner_or_a_job_less(jobs, busy, at):
    here = bounds(busy_instance(jobs, busy)).seconds
    sooner = [0.0 if n == at % len(busy) else s for n, s in enumerate(busy)]
    assert bounds(busy_instance(jobs, sooner)).seconds <= here * (1 + 2e-3)
    assert bounds(busy_instance(jobs, [*busy, 0.0])).seconds <= here * (1 + 2e-3)
    if len(jobs) > 1:
        assert bounds(busy_instance(jobs[1:], busy)).seconds <= here * (1 + 2e-3)


@pytest.mark.parametrize("seed", range(6))
def test_plans_on_busy_devices_are_as_fast_as_enumeration_finds(seed):
    """Every partition of the jobs into packs, and every placing of packs on groups of one or two devices."""
    rng = random.Random(seed)
    jobs = [
        job(i, rng.choice((8, 64)), rng.choice((2, 4)), rng.randrange(2), rng.randint(1, 2)) for i in range(5)
    ]
    busy = (rng.choice((0.0, 30.0)), rng.choice((60.0, 100.0, 150.0)))
    problem = busy_instance(jobs, busy)
    best = float("inf")
    for packs in partitions([k for k, n in problem.counts for _ in range(n)]):
        counts = [tuple((k, pack.count(k)) for k in sorted(set(pack))) for pack in packs]
        for free, d in ((busy, 1), ((max(busy),), 2)):
            run = [choose_pack(problem, c, d).run_s + problem.cost.compile_s for c in counts]
            for where in product(range(len(free)), repeat=len(run)):
                ends = [
                    free[g]
                    + problem.load_seconds(d)
                    + sum(s for s, w in zip(run, where, strict=True) if w == g)
                    for g in set(where)
                ]
                best = min(best, max(ends))
    plan = make_plan(jobs, TINY, cluster(2), options=QUICK, busy_until=busy)
    assert plan.lower_bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= plan.makespan_s <= 1.01 * best


def test_a_device_busy_for_ever_is_left_alone():
    jobs = [job(i, (8, 64)[i % 2], 4, i % 2) for i in range(6)]
    alone = makespan(exact(instance(jobs, "1xA100-40GB")))
    plan = make_plan(jobs, TINY, cluster(3), busy_until=(1e7, 40.0, 1e7))
    assert {pack.devices for pack in plan.packs} == {(1,)}
    assert plan.makespan_s == pytest.approx(40.0 + alone, rel=1e-2) and not plan.baselines
    assert plan.lower_bound_s >= 0.93 * plan.makespan_s
    assert simulate(plan, {j.job_id: j for j in jobs}).makespan_s == pytest.approx(plan.makespan_s, rel=1e-6)


@pytest.mark.parametrize(
    ("busy", "words"),
    [((1.0,), "1 numbers for 2"), ((0.0, -1.0), "at least 0"), ((0.0, float("nan")), "at least 0")],
)
def test_wrong_times_are_refused(busy, words):
    with pytest.raises(PlanError, match=words):
        make_plan([job(0)], TINY, cluster(2), busy_until=busy)
