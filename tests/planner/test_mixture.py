"""Devices of several types: against exhaustive search, each type alone, and the checker."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import (
    Devices,
    DeviceSpec,
    Effort,
    JobSpec,
    Ladder,
    Mixture,
    Options,
    Plan,
    PlanError,
    World,
    check_plan,
    cost_model,
    decoder_shape,
    devices,
    devices_from,
    explain_plan,
    gantt_svg,
    make_plan,
    mix,
    render_plan,
    simulate,
)
from planner.config_lp import make_types
from planner.exact import exact
from planner.groups import makespan
from planner.mixture import mixed_bound, mixed_makespan, recut_between, repair_mixed, rounded
from tests.planner.problems import QWEN, TINY, instance, job, mixture, sweeps
from tests.planner.test_properties import EXAMPLES

QUICK = Options(effort=Effort(recuts=6, proposals=200, dives=2), published=False)
MIXES = st.sampled_from(
    ("1xA100-40GB+1xH200", "2xL40S+1xA100-40GB", "3xA100-40GB+2xH200", "1xA10+1xL40S+1xH200")
)
some = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(some, max_examples=-(-EXAMPLES // 2))


def costs(on):
    return {part.spec.name: cost_model(part.spec) for part in on.parts}


def bound_of(jobs, on):
    problem = mixture(jobs, on)
    return mixed_bound(problem, [make_types(one) for one in problem])


def test_jobs_that_one_type_alone_can_hold_go_there():
    """14B in bf16 is 28 GB: none of it fits an RTX 4090, and nothing is left to trade."""
    shape = decoder_shape("14B", 48, 5120, 13824, 40, 8, 128, 152_064)
    jobs, on = crowd(25), devices("1xRTX4090+2xH200")
    plan = make_plan(jobs, shape, on, options=QUICK)
    assert {pack.device for pack in plan.packs} == {"H200"}
    assert not check_plan(plan, jobs, shape, on, costs(on))


def crowd(n: int, seed: int = 0) -> list[JobSpec]:
    """Draw so many jobs of few kinds, that exact search does not take them."""
    rng = random.Random(seed)
    return [
        job(i, rng.choice((8, 16, 64)), rng.choice((1, 2, 4, 8)), rng.choice((0, 1)), 1 + i % 2, 10_000)
        for i in range(n)
    ]


def test_a_mixture_is_written_with_a_plus():
    on = devices("4xA100-40GB + 2xH200+a10")
    assert isinstance(on, Mixture) and (on.count, on.firsts) == (7, (0, 4, 6))
    assert [on.type_of(n).name for n in range(7)] == ["A100-40GB"] * 4 + ["H200"] * 2 + ["A10"]
    assert str(on) == "4 × A100-40GB + 2 × H200 + 1 × A10"
    assert devices("2xH200+1xH200") == devices("3xH200"), "one type is no mixture"
    from dataclasses import asdict

    assert devices_from(asdict(on)) == on and devices_from(asdict(devices("3xH200"))) == devices("3xH200")


def test_devices_of_one_type_have_the_least_memory_of_any():
    small = DeviceSpec("H100", 60 * 2**30)
    (part,) = mix([Devices(small, 2), *devices("1xH100").parts]).parts
    assert (part.count, part.spec.memory_bytes) == (3, 60 * 2**30)


@pytest.mark.parametrize(
    "text", ["4xA100-40GB+", "+", "1xH200+cpu-16GB", "2xA100-40GB+1xTPU", "1xH200,1xA10"]
)
def test_what_is_no_mixture_is_refused(text):
    with pytest.raises(PlanError):
        devices(text)


@some
@given(sweeps(8), MIXES)
def test_the_checker_finds_no_fault_in_a_mixture(jobs, text):
    on = devices(text)
    plan = make_plan(jobs, TINY, on, options=QUICK)
    assert check_plan(plan, jobs, TINY, on, costs(on)) == []
    assert Plan.from_json(plan.to_json()) == plan
    specs = {j.job_id: j for j in jobs}
    outcome = simulate(plan, specs, World(refill=False))
    assert outcome.makespan_s == pytest.approx(plan.makespan_s, rel=1e-6) and set(outcome.ended) == set(specs)


@few
@given(st.integers(0, 2**16), st.sampled_from(("2xA100-40GB+2xH200", "2xA100-40GB+1xL40S+1xH200")))
def test_the_checker_finds_no_fault_in_a_mixture_with_many_jobs(seed, text):
    on, jobs = devices(text), crowd(40, seed)
    plan = make_plan(jobs, TINY, on, options=replace(QUICK, baselines=False))
    assert plan.method != "exact" and plan.gap < 0.5
    assert check_plan(plan, jobs, TINY, on, costs(on)) == []


@few
@given(sweeps(8), MIXES)
def test_same_input_same_mixed_plan(jobs, text):
    first = make_plan(jobs, TINY, devices(text), options=QUICK)
    again = make_plan(list(reversed(jobs)), TINY, devices(text), options=QUICK)
    assert first.packs == again.packs and first.bound == again.bound


@few
@given(sweeps(8), MIXES)
def test_a_mixture_is_never_planned_worse_than_one_of_its_types_alone(jobs, text):
    on = devices(text)
    plan = make_plan(jobs, TINY, on, options=QUICK)
    for part in on.parts:
        alone = make_plan(jobs, TINY, part, options=QUICK)
        assert plan.makespan_s <= alone.makespan_s * (1 + 1e-9)
        assert plan.lower_bound_s <= alone.makespan_s * (1 + 1e-9)


@some
@given(sweeps(10), st.integers(1, 3), st.integers(1, 3))
def test_the_bound_of_a_mixture_never_rises_with_a_device_more_or_a_job_less(jobs, a, b):
    here = bound_of(jobs, f"{a}xA100-40GB+{b}xH200").seconds * (1 + 2e-3)
    assert bound_of(jobs, f"{a + 1}xA100-40GB+{b}xH200").seconds <= here
    assert bound_of(jobs, f"{a}xA100-40GB+{b + 1}xH200").seconds <= here
    assert bound_of(jobs, f"{a}xA100-40GB+{b}xH200+1xL40S").seconds <= here
    if len(jobs) > 1:
        assert bound_of(jobs[1:], f"{a}xA100-40GB+{b}xH200").seconds <= here


@pytest.mark.parametrize("seed", range(6))
def test_a_tiny_mixture_is_planned_as_well_as_by_trying_every_assignment(seed):
    rng = random.Random(seed)
    names = rng.choice((["1xA100-40GB", "1xH200"], ["2xA100-40GB", "1xL40S"], ["1xA10", "1xL40S", "1xH200"]))
    jobs = [
        job(i, rng.choice((8, 64, 128)), rng.choice((1, 2, 4)), rng.randrange(3), rng.randint(1, 3))
        for i in range(rng.randint(2, 5))
    ]
    best = float("inf")
    for where in product(range(len(names)), repeat=len(jobs)):
        ends = []
        for n, name in enumerate(names):
            mine = [j for j, at in zip(jobs, where, strict=True) if at == n]
            ends.append(makespan(exact(instance(mine, name))) if mine else 0.0)
        best = min(best, max(ends))
    plan = make_plan(jobs, TINY, devices("+".join(names)), options=Options(baselines=False))
    assert plan.makespan_s == pytest.approx(best, rel=1e-9)
    assert plan.lower_bound_s <= best * (1 + 1e-9)


def test_a_job_that_one_type_alone_holds_goes_there():
    """Qwen2.5-7B in bf16 needs 15.2 GB for its weights: one A10 holds them beside a short adapter, no long rows."""
    long = JobSpec("long", 128, 8, 400, 4000.0, 8192, "long")
    short = [JobSpec(f"s{i}", 8, 1, 400, 90.0, 128, "short") for i in range(5)]
    on = devices("1xA10+1xH200")
    with pytest.raises(PlanError, match=r"needs .* GiB on each of 1 A10"):
        make_plan([long], QWEN, devices("1xA10"))
    plan = make_plan([long, *short], QWEN, on)
    assert check_plan(plan, [long, *short], QWEN, on, costs(on)) == []
    assert [pack.device for pack in plan.packs if "long" in pack.jobs] == ["H200"]
    assert {pack.device for pack in plan.packs} == {"A10", "H200"}
    limits = {pack.device: pack.memory_limit_bytes for pack in plan.packs}
    assert limits == {"A10": int(23_028 * 2**20 * 0.92), "H200": int(143_771 * 2**20 * 0.92)}


def test_a_type_that_holds_no_job_stays_idle_and_where_none_does_each_is_told():
    jobs = [JobSpec(f"l{i}", 128, 8, 400, 4000.0, 8192, "long") for i in range(3)]
    plan = make_plan(jobs, QWEN, devices("1xA10+1xH200"), options=QUICK)
    assert {pack.devices for pack in plan.packs} == {(1,)} and "1 × A10 hold none" in plan.notes[0]
    assert plan.device_types == {"A10": 1, "H200": 1} and plan.device_count == 2
    with pytest.raises(PlanError, match=r"1 A10, which may.*; .*1 RTX4090, which may"):
        make_plan(jobs, QWEN, devices("1xA10+1xRTX4090"))


@pytest.fixture(scope="module")
def plan():
    return make_plan(crowd(24), TINY, devices("2xA100-40GB+2xH200"), options=QUICK)


def test_packs_say_their_type_and_all_views_do(plan):
    on = devices("2xA100-40GB+2xH200")
    for pack in plan.to_dict()["packs"]:
        assert pack["device"] == on.type_of(pack["devices"][0]).name
    assert {pack.device for pack in plan.packs} == {"A100-40GB", "H200"}
    text = render_plan(plan)
    assert "on 2 × A100-40GB + 2 × H200" in text and "device      2 H200 |" in text
    assert "device 2 H200" in gantt_svg(plan)
    told = explain_plan(plan, crowd(24), TINY, on)
    assert "2 × H200: " in told and "devices 0 of A100-40GB" in told
    assert plan.baselines["dtm_s"] is None and "one type" in plan.reasons["dtm_s"]
    known = {name: s for name, s in plan.baselines.items() if s is not None}
    assert known.keys() == {"min_gpu_s", "max_gpu_s", "greedy_s", "sequential_s"}
    assert all(plan.makespan_s <= known[name] for name in ("greedy_s", "sequential_s"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: {"device": "H200" if p.device == "A100-40GB" else "A100-40GB"}, "its devices are"),
        (lambda p: {"devices": (1, 2), "degree": 2}, "on devices of more types than"),
        (lambda p: {"devices": tuple(3 - d for d in p.devices)}, "a step takes .* s, the plan says"),
        (lambda p: {"devices": (9,)}, "on devices"),
        (lambda p: {"slots": p.slots * 60}, "more than a device may use"),
    ],
)
def test_the_checker_sees_what_only_a_mixture_can_have_wrong(plan, change, words):
    import re

    on, (first, *rest) = devices("2xA100-40GB+2xH200"), plan.packs
    faults = check_plan(
        replace(plan, packs=(replace(first, **change(first)), *rest)), crowd(24), TINY, on, costs(on)
    )
    assert any(re.search(words, fault) for fault in faults), faults


def test_the_checker_rejects_a_bound_of_a_mixture_that_is_too_high(plan):
    on = devices("2xA100-40GB+2xH200")
    assert check_plan(plan, crowd(24), TINY, on, costs(on)) == []
    (fault,) = check_plan(
        replace(plan, lower_bound_s=plan.lower_bound_s * 1.01), crowd(24), TINY, on, costs(on)
    )
    assert "does not hold" in fault


@pytest.mark.parametrize("n", [1, 8])
def test_one_adapter_at_a_time_fills_the_machine_that_then_ends_first(n):
    """Min GPU against a plain list schedule: equal jobs on an H200, which is slower to launch, and an A100."""
    from planner.baselines import eager_step_s

    jobs, on = [job(i, 16, 4, 1) for i in range(n)], "1xH200+1xA100-40GB"
    one_s = [
        -(-2500 // 4) * eager_step_s(one, 0, 1) + one.eval_seconds(1, 0) + one.load_seconds(1)
        for one in mixture(jobs, on)
    ]
    free = [0.0, 0.0]
    for _ in jobs:
        n = min((0, 1), key=lambda n: free[n] + one_s[n])
        free[n] += one_s[n]
    plan = make_plan(jobs, TINY, devices(on), options=QUICK)
    assert plan.baselines["min_gpu_s"] == pytest.approx(max(free), rel=1e-9)


def test_a_cost_model_is_that_of_the_type_it_names():
    jobs, on = [job(i, 16, 4, 1) for i in range(6)], devices("1xA100-40GB+1xH200")
    fast = cost_model(on.parts[1].spec).slowed(0.5)
    plain = make_plan(jobs, TINY, on, options=QUICK)
    for model in (fast, {"H200": fast}):
        faster = make_plan(jobs, TINY, on, cost_model=model, options=QUICK)
        assert faster.makespan_s < plain.makespan_s
        assert check_plan(faster, jobs, TINY, on, costs(on) | {"H200": fast}) == []
    for model in (replace(fast, device="B200"), {"B200": fast}):
        with pytest.raises(PlanError, match="B200"):
            make_plan(jobs, TINY, on, cost_model=model)


@few
@given(sweeps(8), sweeps(8), st.sampled_from(("1xA100-40GB+2xH200", "2xA100-40GB+1xH200")))
def test_planning_a_mixture_again_is_never_worse_than_the_old_plan_repaired(jobs, others, after):
    old = make_plan(jobs, TINY, devices("2xA100-40GB+2xH200"), options=QUICK)
    repaired = repair_mixed(mixture(others, after), old.packs)
    assert repaired is not None
    assert sum(n for own in repaired for g in own for p in g.packs for _, n in p.counts) == len(others)
    new = make_plan(others, TINY, devices(after), options=QUICK, incumbent=old.packs)
    assert new.makespan_s <= mixed_makespan(repaired) * (1 + 1e-9)


def test_a_good_plan_of_a_mixture_is_kept_where_the_search_finds_none_as_good():
    jobs, on = crowd(40, 3), devices("2xA100-40GB+2xH200")
    good = make_plan(jobs, TINY, on, options=Options(baselines=False))
    poor = Options(effort=Effort(recuts=0, proposals=0, dives=0), baselines=False)
    again = make_plan(jobs, TINY, on, options=poor, incumbent=good.packs)
    assert again.makespan_s <= good.makespan_s * (1 + 1e-9)
    assert check_plan(again, jobs, TINY, on, costs(on), bound=False) == []


def test_packs_of_a_mixture_begin_when_their_devices_are_free():
    jobs, on = crowd(24), devices("1xA100-40GB+2xH200")
    busy = (0.0, 400.0, 30.0)
    plan = make_plan(jobs, TINY, on, options=QUICK, busy_until=busy)
    assert check_plan(plan, jobs, TINY, on, costs(on)) == [] and plan.baselines == {}
    first = {pack.devices[0]: pack.start_s for pack in reversed(plan.packs)}
    assert all(start >= busy[device] for device, start in first.items()) and first[2] == 30.0
    idle = make_plan(jobs, TINY, on, options=QUICK)
    assert idle.lower_bound_s < plan.lower_bound_s <= plan.makespan_s
    with pytest.raises(PlanError, match="2 numbers for 3 devices"):
        make_plan(jobs, TINY, on, busy_until=(1.0, 2.0))


def test_with_early_stopping_jobs_of_a_mixture_are_planned_whole():
    jobs, on = crowd(24), devices("1xA100-40GB+1xH200")
    stops = replace(QUICK, early_stop=lambda _: Ladder(), baselines=False)
    plan = make_plan(jobs, TINY, on, options=stops)
    assert plan.expected_s is not None and all(pack.rung is None for pack in plan.packs)
    assert "planned whole" in plan.notes[-1]
    with pytest.raises(PlanError, match="one type alone"):
        make_plan(jobs, TINY, on, options=replace(stops, by_rung=True))


def test_jobs_traded_between_types_are_never_lost_and_never_make_it_slower():
    jobs = crowd(30, 5)
    problem = mixture(jobs, "2xA100-40GB+2xH200")
    start = repair_mixed(problem, ())
    assert start is not None
    found = recut_between(problem, start, 300, 0, 0.0)
    done = [0] * len(problem[0].classes)
    for group in (group for own in found for group in own):
        for pack in group.packs:
            for k, n in pack.counts:
                done[k] += n
    assert done == [n for _, n in problem[0].counts]
    assert mixed_makespan(found) < mixed_makespan(start)


def test_rounded_deals_hold_every_job_and_carry_what_they_cut_off():
    import numpy as np

    jobs = np.array([[0.5, 0.5, 0.5, 0.5, 3.0], [0.5, 0.5, 0.5, 0.5, 0.0]])
    (a, b) = rounded(jobs, np.array([1, 1, 1, 1, 3]))
    assert [dict(a).get(k, 0) + dict(b).get(k, 0) for k in range(5)] == [1, 1, 1, 1, 3]
    assert sum(n for _, n in a) == 5 and dict(b).get(4, 0) == 0
