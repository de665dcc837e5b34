"""What must hold for every sweep: plans are whole, feasible, deterministic and no better than their bound."""

import os

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planner import Effort, Options, Plan, World, check_plan, cost_model, make_plan, simulate
from planner.groups import makespan
from planner.incumbent import repair
from planner.ours import bounds
from tests.planner.problems import TINY, cluster, crowd, instance, job, sweeps

QUICK = Options(effort=Effort(recuts=4, proposals=200), published=False)
CROWDED = Options(effort=Effort(recuts=4, proposals=600), baselines=False)
EXAMPLES = int(os.environ.get("PLORA_EXAMPLES", "8"))
some = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIES = [job(n, 8, 2, 1, epochs) for n, epochs in enumerate((2, 2, 2, 1, 2, 3))] + [job(6, 8, 1), job(7, 8, 1)]


@some
@given(sweeps(), st.sampled_from((1, 2, 3, 5, 8)))
def test_the_checker_finds_no_fault(jobs, count):
    """Every job once, no slot or device double-booked, memory in limit, times and bound as claimed."""
    on = cluster(count)
    plan = make_plan(jobs, TINY, on, options=QUICK)
    assert check_plan(plan, jobs, TINY, on, cost_model(on.spec)) == []
    assert Plan.from_json(plan.to_json()) == plan


@settings(some, max_examples=-(-EXAMPLES // 2))
@example(8)  # on these two the local search once lost jobs of a class that came twice in a line
@example(9)
@given(st.integers(0, 2**16))
def test_the_checker_finds_no_fault_with_many_jobs(seed):
    """The same for sweeps that only the line cuts and the local search plan; no baseline may stand in."""
    jobs, count = crowd(seed)
    on = cluster(count)
    plan = make_plan(jobs, TINY, on, options=CROWDED)
    assert plan.method != "exact"
    assert check_plan(plan, jobs, TINY, on, cost_model(on.spec)) == []


@some
@given(sweeps(), st.sampled_from((1, 3, 4)))
def test_same_input_same_plan(jobs, count):
    first = make_plan(jobs, TINY, cluster(count), options=QUICK)
    again = make_plan(list(reversed(jobs)), TINY, cluster(count), options=QUICK)
    assert first.packs == again.packs and first.makespan_s == again.makespan_s


@some
@given(sweeps(), st.integers(1, 7))
def test_the_bound_never_rises_with_a_device_more_or_a_job_less(jobs, count):
    here = bounds(instance(jobs, f"{count}xA100-40GB")).seconds
    assert bounds(instance(jobs, f"{count + 1}xA100-40GB")).seconds <= here * (1 + 2e-3)
    if len(jobs) > 1:
        assert bounds(instance(jobs[1:], f"{count}xA100-40GB")).seconds <= here * (1 + 2e-3)


@some
@given(sweeps(), sweeps(), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)))
def test_planning_again_is_never_worse_than_the_old_plan_repaired(jobs, others, before, after):
    old = make_plan(jobs, TINY, cluster(before), options=QUICK)
    problem = instance(others, f"{after}xA100-40GB")
    repaired = repair(problem, old.packs)
    assert repaired is not None
    new = make_plan(others, TINY, cluster(after), options=QUICK, incumbent=old.packs)
    assert new.makespan_s <= makespan(repaired) * (1 + 1e-9)
    assert sum(n for g in repaired for p in g.packs for _, n in p.counts) == len(others)


@some
@example(TIES, 1)  # jobs that started apart end at one step: which is scored first?
@given(sweeps(), st.sampled_from((1, 3)))
def test_without_noise_the_simulator_takes_the_predicted_time(jobs, count):
    plan = make_plan(jobs, TINY, cluster(count), options=QUICK)
    specs = {j.job_id: j for j in jobs}
    outcome = simulate(plan, specs, World(refill=False))
    assert abs(outcome.makespan_s - plan.makespan_s) <= 1e-6 * plan.makespan_s
    assert set(outcome.ended) == set(specs)
    dated = {a.job_id: a.end_s for pack in plan.packs for a in pack.assign}
    assert all(abs(dated[j] - t) <= 1e-6 * plan.makespan_s for j, t in outcome.ended.items())


def test_the_plan_is_the_best_of_all_methods():
    jobs = [job(i, 8 * 2 ** (i % 4), 2 ** (i % 3)) for i in range(18)]
    plan = make_plan(jobs, TINY, cluster(4))
    known = {name: s for name, s in plan.baselines.items() if s is not None}
    assert known.keys() >= {"min_gpu_s", "max_gpu_s", "greedy_s", "sequential_s", "dtm_s"}
    assert all(plan.makespan_s <= s * (1 + 1e-9) for s in known.values())
