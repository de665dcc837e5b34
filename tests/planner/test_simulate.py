"""The simulator: noise, stops, failures, crashes, late jobs, refill, each against what must follow."""

import statistics

import pytest

from planner import JobSpec, Ladder, Options, World, asha_stops, expected_makespan, make_plan, simulate
from tests.planner.problems import TINY, cluster, job

JOBS = [job(i, 16, 4, 1, 1 + i % 2) for i in range(24)]
SPECS = {j.job_id: j for j in JOBS}
PLAN = make_plan(JOBS, TINY, cluster(2), options=Options(baselines=False))


def test_noise_averages_out_near_the_prediction():
    spans = [simulate(PLAN, SPECS, World(noise=0.05), seed).makespan_s for seed in range(30)]
    assert statistics.mean(spans) == pytest.approx(PLAN.makespan_s, rel=0.05)
    assert len(set(spans)) == 30
    assert simulate(PLAN, SPECS, World(noise=0.05), 3).makespan_s == spans[3]


def test_early_stopping_with_refill_saves_time():
    spans = [simulate(PLAN, SPECS, World(stop=asha_stops()), seed) for seed in range(10)]
    assert statistics.mean(s.makespan_s for s in spans) < 0.95 * PLAN.makespan_s
    assert all(set(s.how.values()) <= {"completed", "stopped"} and len(s.ended) == len(JOBS) for s in spans)
    mean = expected_makespan(PLAN, SPECS, asha_stops(), draws=10)
    assert mean == pytest.approx(statistics.mean(s.makespan_s for s in spans))
    without = [
        simulate(PLAN, SPECS, World(stop=asha_stops(), refill=False), seed).makespan_s for seed in range(10)
    ]
    assert mean <= statistics.mean(without) * (1 + 1e-9)


def test_refill_never_lengthens_a_plan_without_events():
    assert simulate(PLAN, SPECS).makespan_s <= PLAN.makespan_s * (1 + 1e-9)


def test_failures_end_jobs_and_free_their_slots():
    outcome = simulate(PLAN, SPECS, World(fail=1.0), 1)
    assert set(outcome.how.values()) == {"failed"} and outcome.makespan_s < PLAN.makespan_s


def test_crashes_cost_their_recovery():
    outcome = simulate(PLAN, SPECS, World(crash_s=100.0, recover_s=50.0), 0)
    assert outcome.crashes > 0 and outcome.makespan_s > PLAN.makespan_s


def test_a_late_job_takes_a_slot_that_fits_and_another_waits():
    fitting = JobSpec("late", 8, 4, 400, 152.0, 256, "middle")
    too_wide = JobSpec("wide", 256, 4, 400, 152.0, 256, "middle")
    outcome = simulate(PLAN, SPECS, World(arrivals=((1.0, fitting), (1.0, too_wide))))
    assert "late" in outcome.ended and outcome.left == ["wide"] and outcome.refills >= 1


def test_expected_time_is_part_of_the_plan():
    early = Options(baselines=False, early_stop=lambda _: Ladder(), by_rung=False)
    plan = make_plan(JOBS, TINY, cluster(2), options=early)
    assert plan.expected_s is not None and plan.expected_s < plan.makespan_s == PLAN.makespan_s


def test_a_pack_with_half_its_slots_empty_goes_on_with_fewer():
    """By hand: nine of ten jobs stop after 400 of 4,000 steps; one slot's step takes a tenth, its compilation 50 s."""
    jobs = [JobSpec(f"j{i}", 8, 1, 4000, 90.0, 128, "short") for i in range(10)]
    plan = make_plan(jobs, TINY, cluster(1), options=Options(baselines=False))
    (pack,) = plan.packs
    assert pack.J == 10 and pack.m == 1
    world = World(
        stop=lambda job, _: 1.0 if job.job_id == "j3" else 0.1,
        smaller=lambda pack, slots: pack.step_s / 10 if slots == 1 else 0.0,
        compile_s=50.0,
    )
    scoring = sum(a.scoring_s for a in pack.assign)
    want = pack.setup_s + 400 * pack.step_s + 50 + 3600 * pack.step_s / 10 + scoring
    specs = {j.job_id: j for j in jobs}
    assert simulate(plan, specs, world).makespan_s == pytest.approx(want)


def test_evaluations_that_a_stop_spares_cost_nothing():
    jobs = [JobSpec("j", 8, 1, 900, 90.0, 128, "short", eval_tokens=900_000)]
    plan = make_plan(jobs, TINY, cluster(1), options=Options(baselines=False))
    (pack,) = plan.packs
    world = World(stop=asha_stops(10**9), ladders=lambda _: Ladder())  # it stops at 1/9
    want = pack.setup_s + 100 * pack.step_s + pack.assign[0].scoring_s / 3
    assert simulate(plan, {"j": jobs[0]}, world).makespan_s == pytest.approx(want)
