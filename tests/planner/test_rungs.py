"""Planning rung by rung: what a stretch is, what its plan promises, and the policy that replays it."""

from dataclasses import replace

import pytest

from planner import (
    JobSpec,
    Ladder,
    Options,
    Plan,
    World,
    check_plan,
    explain_plan,
    make_plan,
    render_plan,
    rest,
    simulate,
    state_bytes,
    stretch,
)
from planner.time import cost_model
from tests.planner.problems import QWEN, TINY, cluster, job

ON = cluster(2)
JOBS = [job(i, (8, 16, 64, 128)[i % 4], (1, 4, 8)[i % 3], 1, 4, 30_000) for i in range(24)]
SPECS = {one.job_id: one for one in JOBS}


def ladders(one: JobSpec) -> Ladder:
    """Give the jobs of rank 8 a ladder without the first rung, as brackets do."""
    return Ladder(3, (1 / 3,)) if one.rank == 8 else Ladder(3, (1 / 9, 1 / 3))


def plan_of(jobs: list[JobSpec] = JOBS, by_rung: bool | None = None, on=ON, shape=TINY) -> Plan:
    return make_plan(jobs, shape, on, options=Options(baselines=False, early_stop=ladders, by_rung=by_rung))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Give a plan that goes rung by rung because that is faster."""
    return plan_of()


def test_a_stretch_by_hand():
    """100 rows in batches of 8 are 13 steps; 1/9 and 1/3 of them, rounded up, are 2 and 5."""
    whole = JobSpec("a", 16, 8, 100, 90.0, 128, "rows", eval_tokens=300)
    ladder = Ladder(3, (1 / 9, 1 / 3))
    first, end = stretch(whole, ladder, 0.0)
    assert (first.rows, first.data, first.eval_tokens, end) == (16, "rows", 100, 2 / 13)
    second, end = stretch(whole, ladder, end)
    assert (second.rows, second.data, end) == (24, "rows from row 16", 5 / 13)
    third, end = stretch(whole, ladder, end)
    assert (third.rows, third.data, end) == (60, "rows from row 40", 1.0)
    short, end = stretch(replace(whole, rows=9), ladder, 0.0)  # two steps: both rungs fall on the first
    assert (short.rows, end) == (8, 0.5) and stretch(replace(whole, rows=9), ladder, 0.5)[1] == 1.0
    assert stretch(whole, Ladder(3, ()), 0.0)[1] == 1.0


def test_state_that_moves_by_hand():
    """Rank 16 of Qwen2.5-7B is half of its published 80,740,352 parameters at rank 32; weights and two moments."""
    one, ladder = JobSpec("a", 16, 8, 800, 90.0, 128), Ladder(3, (1 / 9, 1 / 3))
    assert state_bytes(one, QWEN) == 4 * 3 * 80_740_352 // 2
    assert state_bytes(replace(one, optimizer="sgd"), QWEN) == 4 * 2 * 80_740_352 // 2
    moved = [
        rest(one, ladder, done, QWEN).state_bytes // state_bytes(one, QWEN) for done in (0.0, 0.12, 0.34)
    ]
    assert moved == [1, 2, 1]  # written; read and written; read


def test_the_plan_is_sound_and_what_runs_without_stops(plan):
    assert plan.method == "rung by rung" and {pack.rung for pack in plan.packs} == {0, 1, 2}
    assert check_plan(plan, JOBS, TINY, ON, cost_model(ON.spec)) == []
    calm = simulate(plan, SPECS, World(refill=False))
    assert calm.makespan_s == pytest.approx(plan.makespan_s, rel=1e-9)
    assert set(calm.how.values()) == {"completed"} and len(calm.ended) == 24
    assert plan.makespan_s == max(pack.end_s for pack in plan.packs)
    jobs = [replace(one, optimizer=("sgd", "adamw_bf16", "adamw")[i % 3]) for i, one in enumerate(JOBS)]
    mixed = plan_of(jobs, by_rung=True)  # whose states that move are of other sizes
    assert mixed.method == "rung by rung"
    assert check_plan(mixed, jobs, TINY, ON, cost_model(ON.spec)) == []


def test_a_broken_plan_is_found(plan):
    last = max(pack.rung for pack in plan.packs)
    shapes = [
        replace(plan, packs=tuple(p for p in plan.packs if p.rung < last)),
        replace(plan, packs=tuple(replace(p, rung=0) for p in plan.packs)),
        replace(plan, packs=tuple(replace(p, rung=last - p.rung) for p in plan.packs)),
    ]
    for broken in shapes:
        assert check_plan(broken, JOBS, TINY, ON, cost_model(ON.spec), bound=False)


def test_rung_by_rung_is_taken_where_it_is_expected_to_end_earlier(plan):
    whole = plan_of(by_rung=False)
    assert whole.whole is None and {pack.rung for pack in whole.packs} == {None}
    assert plan.whole == {"makespan_s": whole.makespan_s, "expected_s": whole.expected_s}
    assert plan.expected_s < 0.7 * whole.expected_s and plan.expected_s < plan.makespan_s
    # compiling for every rung costs more here than all of the training
    few = [job(i, 16, 4, 2, 1) for i in range(4)]
    assert plan_of(few).packs == plan_of(few, by_rung=False).packs
    asked = plan_of(few, by_rung=True)
    assert asked.whole and asked.expected_s >= asked.whole["expected_s"]


def test_the_policy_is_asked_with_those_that_pass_and_how_far_they_are(plan):
    """Jobs 1 to 3 pass the first rung and job 1 the second; a rung takes as long as its slowest group."""
    asked = []

    def policy(done, rung):
        asked.append((dict(done), rung))
        names = set(done)
        packs = [p for p in plan.packs if p.rung == rung]
        return [
            replace(p, jobs=tuple(a.job_id for a in p.assign if a.job_id in names),
                    assign=tuple(a for a in p.assign if a.job_id in names))
            for p in packs if names & set(p.jobs)
        ]  # fmt: skip

    shares = {"job-1": 1.0, "job-2": 1 / 3, "job-3": 1 / 3}

    def stop(one, _):
        return shares.get(one.job_id, ladders(one).rungs[0])

    found = simulate(plan, SPECS, World(stop=stop, ladders=ladders), 0, policy)
    ends = {name: (stretch(SPECS[name], ladders(SPECS[name]), 0.0)[1]) for name in shares}
    assert asked == [(ends, 1), ({"job-1": stretch(SPECS["job-1"], Ladder(), ends["job-1"])[1]}, 2)]
    assert found.how["job-1"] == "completed" and found.how["job-2"] == found.how["job-4"] == "stopped"
    assert found.makespan_s == found.ended["job-1"] > found.ended["job-2"] > found.ended["job-4"]
    # without a policy they go on in the packs of the plan, which are the same here
    assert simulate(plan, SPECS, World(stop=stop, ladders=ladders), 0).ended == found.ended


def test_late_jobs_are_planned_at_the_next_rung(plan):
    late, asked = JobSpec("late", 8, 4, 400, 152.0, 256, "middle"), []

    def policy(done, rung):
        asked.append(set(done))
        one = next(p for p in plan.packs if p.rung == 0)
        a = replace(one.assign[0], job_id="late")
        return [replace(one, jobs=("late",), assign=(a,), start_s=0.0)] if "late" in done else []

    world = World(stop=lambda one, _: 1.0 if one is late else 1 / 9, arrivals=((1.0, late),))
    found = simulate(plan, SPECS, world, 0, policy)
    assert asked[0] >= {"late"} and found.how["late"] == "completed" and found.left == []
    assert simulate(plan, SPECS, world, 0).left == ["late"]  # nobody plans it


def test_it_is_shown_explained_and_written(plan):
    assert Plan.from_json(plan.to_json()) == plan
    shown = render_plan(plan)
    assert "planned rung by rung; as whole jobs" in shown and "expected (simulated)" in shown
    assert "rung by rung: at each rung all jobs wait" in explain_plan(plan, JOBS, TINY, ON)
    assert "rung" not in render_plan(plan_of(by_rung=False))
