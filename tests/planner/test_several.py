"""Several sweeps on devices of their own: against every deal of the devices, and the checker."""

import random
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import (
    JobSpec,
    Ladder,
    Options,
    PlanError,
    Problem,
    SeveralPlan,
    check_several,
    decoder_shape,
    devices,
    make_plan,
    plan_several,
)
from planner import several as module
from planner.ours import bounds
from planner.several import numbers
from tests.planner.problems import QWEN, TINY, cluster, instance, job
from tests.planner.test_properties import some

PLAIN = Options(baselines=False)
SMALL = decoder_shape("small-3B", 28, 3072, 8192, 24, 8, 128, 128_256, tied=True)
HUGE = decoder_shape(
    "Qwen2.5-32B", 64, 5120, 27648, 40, 8, 128, 152_064
)  # 65 GB in bf16: two A100-40GB, or more


def problem(name: str, jobs: list[JobSpec], shape=TINY, **options) -> Problem:
    return Problem(name, jobs, shape, options=replace(PLAIN, **options))


def all_deals(least: list[int], count: int) -> list[tuple[int, ...]]:
    """Return every way to give sweeps at least what they need, of so many devices or fewer."""
    ways = product(*(range(few, count + 1) for few in least))
    return [way for way in ways if sum(way) <= count]


@pytest.mark.parametrize("seed", [0, 3])
def test_no_deal_of_the_devices_is_better(seed, monkeypatch):
    """Every deal is planned and bounded. What takes a tenth of a second is kept for the next use."""
    rng = random.Random(seed)
    asked = [
        problem(
            name,
            [job(i, rng.choice((8, 64)), rng.choice((1, 4)), rng.choice((0, 1))) for i in range(n)],
            shape,
        )
        for name, n, shape in (("a", 3, TINY), ("b", 2, SMALL))
    ]
    plans, found = {}, {}

    def planned(jobs, shape, on, **how):
        if (shape.name, on.count) not in plans:
            plans[shape.name, on.count] = make_plan(jobs, shape, on, **how)
        return plans[shape.name, on.count]

    def bounded(one):
        if (one.shape.name, one.devices.count) not in found:
            found[one.shape.name, one.devices.count] = bounds(one)
        return found[one.shape.name, one.devices.count]

    def end_of(k, g):
        return planned(asked[k].jobs, asked[k].shape, cluster(g), options=PLAIN).makespan_s

    def bound_of(k, g):
        return bounded(instance(asked[k].jobs, f"{g}xA100-40GB", asked[k].shape)).seconds

    monkeypatch.setattr(module, "make_plan", planned)
    monkeypatch.setattr(module, "bounds", bounded)
    ended = []
    for count in (2, 3, 4):
        ways = all_deals([1, 1], count)
        plan = plan_several(asked, cluster(count))
        best, bound = (
            min(max(t(k, g) for k, g in enumerate(way)) for way in ways) for t in (end_of, bound_of)
        )
        assert plan.makespan_s == pytest.approx(best, rel=1e-9)
        assert plan.lower_bound_s == pytest.approx(bound, rel=1e-6) and bound <= best * (1 + 1e-9)
        assert plan.in_turn_s == sum(bound_of(k, count) for k in (0, 1))
        ended.append((plan.makespan_s, plan.lower_bound_s))
    assert ended == sorted(ended, reverse=True) and ended[0][0] > ended[-1][0], "more devices, no later"


class Known:
    """Stand in for a sweep of which bounds and makespans are given for every number of devices; counts the look-ups."""

    known, about, at_least, ends = (
        getattr(module._Sweep, name) for name in ("known", "about", "at_least", "ends")
    )

    def __init__(self, least: int, seconds: list[float], makespans: list[float]) -> None:
        self.least, self.most, self.seconds, self.makespans = least, len(seconds) - 1, seconds, makespans
        self.bounds: dict[int, float] = {}
        self.plans: dict[int, SimpleNamespace] = {}

    def bound(self, n: int) -> None:
        self.bounds[n] = self.seconds[n]

    def plan(self, n: int) -> None:
        pack = SimpleNamespace(devices=range(self.least + n))
        self.plans[n] = SimpleNamespace(makespan_s=self.makespans[n], packs=[pack])


@st.composite
def known_sweeps(draw, most: int, spare: st.SearchStrategy[int]):
    """Draw sweeps whose time is a + b / groups, groups of one size, and never below c; plans are up to 30 % above."""
    spare = draw(spare)
    out = []
    for _ in range(draw(st.integers(2, most))):
        least, size = draw(st.sampled_from(((1, 1), (1, 1), (2, 2), (3, 3))))
        a, b, c = draw(st.floats(0, 20)), draw(st.floats(10, 5000)), draw(st.floats(0, 300))
        counts = least + np.arange(spare + 1)
        seconds = np.maximum(a + b / (counts // size), c)
        above = [draw(st.sampled_from((1.0, 1.02, 1.1, 1.3))) for _ in range(min(len(counts), 12))]
        makespans = np.minimum.accumulate(seconds * np.resize(above, len(counts)))
        out.append(Known(least, seconds.tolist(), makespans.tolist()))
    return out, spare


@settings(some, max_examples=40)
@given(known_sweeps(3, st.sampled_from((0, 1, 5, 40, 150))))
def test_the_deal_by_bounds_is_the_best_of_all(drawn):
    """For every time that some bound is, the devices that all sweeps need by then are counted."""
    known, spare = drawn
    times = sorted(seconds for sweep in known for seconds in sweep.seconds)
    needed = lambda sweep, C: next((n for n, s in enumerate(sweep.seconds) if s <= C), spare + 1)  # noqa: E731
    best = next(C for C in times if sum(needed(sweep, C) for sweep in known) <= spare)
    given, bound = module._by_bounds(known, spare)
    assert bound == pytest.approx(best, rel=1e-12) and sum(given) == spare
    assert max(sweep.seconds[n] for sweep, n in zip(known, given, strict=True)) == bound


@settings(some, max_examples=20)
@given(known_sweeps(2, st.just(1_000)))
def test_few_bounds_are_found_among_many_devices(drawn):
    known, spare = drawn
    module._by_bounds(known, spare)
    assert sum(len(sweep.bounds) for sweep in known) <= 60


def test_sweeps_that_many_devices_end_no_sooner_take_few_bounds():
    flat = [Known(1, [max(60.0, 600.0 / (n + 1)) for n in range(99_999)], []) for _ in range(2)]
    _, bound = module._by_bounds(flat, 99_998)
    assert bound == 60.0 and sum(len(sweep.bounds) for sweep in flat) <= 10


@settings(some, max_examples=40)
@given(known_sweeps(3, st.integers(0, 7)))
def test_the_deal_by_plans_is_the_best_of_all(drawn):
    known, spare = drawn
    deals = all_deals([0] * len(known), spare)
    best = min(max(known[k].makespans[n] for k, n in enumerate(way)) for way in deals)
    found = module._by_plans(known, spare, module._by_bounds(known, spare)[0])
    made = sum(len(sweep.plans) for sweep in known)
    assert max(sweep.makespans[n] for sweep, n in zip(known, found, strict=True)) == best
    assert sum(found) <= spare and made <= len(known) + module.TRIES


@pytest.fixture(scope="module")
def both():
    asked = [
        problem("a", [job(i, (8, 64)[i % 2], 4, i % 2) for i in range(4)]),
        problem("b", [job(i, 16, 2) for i in range(12)], SMALL),
    ]
    return asked, plan_several(asked, cluster(3))


def test_the_checker_finds_no_fault_and_json_keeps_all(both):
    asked, plan = both
    assert [len(share.devices) for share in plan.sweeps] == [1, 2] and plan.sweeps[1].devices == (1, 2)
    assert {n for pack in plan.sweeps[1].placed.packs for n in pack.devices} == {1, 2}
    assert check_several(plan, asked, cluster(3)) == []
    assert SeveralPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="not a plan of several"):
        SeveralPlan.from_json(plan.sweeps[0].plan.to_json())


def test_a_bound_by_prices_is_proven_by_them():
    asked = [
        problem("a", [job(i, (8, 64)[i % 2], 4, i % 2) for i in range(5)]),
        problem("b", [job(0)], SMALL),
    ]
    plan = plan_several(asked, cluster(2))
    assert plan.sweeps[0].prices.keys() == {f"job-{n}" for n in range(5)} and plan.sweeps[0].too_few == 1
    assert check_several(plan, asked, cluster(2)) == []
    without = replace(plan, sweeps=(replace(plan.sweeps[0], prices={}), plan.sweeps[1]))
    (fault,) = check_several(without, asked, cluster(2))
    assert "a: 1 × A100-40GB are not shown" in fault


def test_same_input_same_plan_and_one_sweep_alone_is_planned_as_ever(both):
    asked, plan = both
    (alone,) = plan_several(asked[:1], cluster(2)).sweeps
    usual = make_plan(asked[0].jobs, TINY, cluster(2), options=PLAIN)
    same = lambda one: replace(one, planning_s=0.0, baselines_s=0.0)  # noqa: E731
    assert same(alone.plan) == same(usual) and alone.devices == (0, 1)
    again = plan_several([one._replace(jobs=list(reversed(one.jobs))) for one in asked], cluster(3))
    assert [(s.devices, s.plan.packs, s.too_few) for s in again.sweeps] == [
        (s.devices, s.plan.packs, s.too_few) for s in plan.sweeps
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: {"lower_bound_s": p.lower_bound_s * 1.01}, "are not shown to be too few"),
        (lambda p: {"sweeps": (p.sweeps[0], replace(p.sweeps[1], devices=(0, 1)))}, "device 0 is in several"),
        (lambda p: {"sweeps": (p.sweeps[0], replace(p.sweeps[1], devices=(1, 3)))}, "3 is not on the machine"),
        (lambda p: {"sweeps": (p.sweeps[0], replace(p.sweeps[1], too_few=0))}, "bound does not hold: every"),
        (lambda p: {"sweeps": (replace(p.sweeps[0], too_few=1), p.sweeps[1])}, "a: 1 .* not shown"),
        (lambda p: {"sweeps": (replace(p.sweeps[0], plan=p.sweeps[1].plan), p.sweeps[1])}, "a: job"),
        (lambda p: {"sweeps": p.sweeps[::-1]}, "not those that were asked for"),
    ],
)  # fmt: skip
def test_the_checker_sees_what_only_several_can_have_wrong(both, change, words):
    asked, plan = both
    faults = check_several(replace(plan, **change(plan)), asked, cluster(3))
    assert any(re.search(words, fault) for fault in faults), faults


def test_a_sweep_gets_the_devices_that_its_largest_job_needs():
    """Of Qwen2.5-7B in bf16, one A10 holds short adapters, and two are needed for rows of 8,192 tokens."""
    short, long = JobSpec("short", 8, 1, 400, 90.0, 128), JobSpec("long", 128, 8, 400, 4000.0, 8192)
    on = devices("3xA10")
    plan = plan_several([problem("long", [short, long], QWEN), problem("short", [short], QWEN)], on)
    assert [share.devices for share in plan.sweeps] == [(0, 1), (2,)]
    with pytest.raises(PlanError, match=r"at least long 2, short 1"):
        plan_several(
            [problem("long", [short, long], QWEN), problem("short", [short], QWEN)], devices("2xA10")
        )


def test_what_cannot_be_planned_is_said():
    one, other = problem("a.yaml", [job(0)], HUGE), problem("b.yaml", [job(0)], HUGE)
    with pytest.raises(
        PlanError, match=r"3 × A100-40GB are too few .* at least a.yaml 2, b.yaml 2; run them one"
    ):
        plan_several([one, other], cluster(3))
    with pytest.raises(PlanError, match=r"a.yaml: Qwen2.5-32B in bf16 .* 2 devices would hold it"):
        plan_several([one, other], cluster(1))
    with pytest.raises(PlanError, match="devices of one type, not on 2 × A100-40GB"):
        plan_several([one, other], devices("2xA100-40GB+2xH200"))
    with pytest.raises(PlanError, match="another name"):
        plan_several([one, one], cluster(8))
    with pytest.raises(PlanError, match=r"b.yaml: no jobs"):
        plan_several([one, other._replace(jobs=())], cluster(8))


def test_devices_that_end_a_sweep_no_earlier_may_idle():
    sweep = Known(1, [], [200.0, 100.0, 100.0, 105.0, 90.0])
    for n in (1, 3):
        sweep.plan(n)
    assert sweep.ends(np.full(5, np.inf)).tolist() == [np.inf, 100, 100, 100, 100]
    assert sweep.ends(np.array([80.0, 70.0, 60.0, 50.0, 40.0])).tolist() == [100, 100, 100, 100, 40]


@settings(some, max_examples=30)
@given(st.lists(st.integers(1, 21), min_size=1, max_size=4), st.integers(0, 2**16))
def test_no_pack_is_put_on_two_hosts(counts, seed):
    """Each sweep's groups, of powers of two and larger ones first, fill its devices from number 0."""
    rng, plans = random.Random(seed), []
    for count in counts:
        packs, at = [], 0
        while at < count:
            size = min(
                rng.choice((1, 2, 4, 8)), 2 ** ((count - at).bit_length() - 1), packs[-1] if packs else 8
            )
            packs, at = [*packs, size], at + size
        ends = np.cumsum([0, *packs]).tolist()
        on = [
            SimpleNamespace(devices=tuple(range(end - size, end)))
            for end, size in zip(ends[1:], packs, strict=True)
        ]
        plans.append(SimpleNamespace(device_count=count, packs=on))
    where = numbers(plans, cluster(sum(counts)))
    assert sorted(n for own in where for n in own) == list(range(sum(counts)))
    assert [len(own) for own in where] == counts
    for plan, own in zip(plans, where, strict=True):
        for pack in plan.packs:
            assert len({own[n] // 8 for n in pack.devices}) == 1


def test_jobs_that_may_stop_are_dealt_as_whole_ones(both, monkeypatch):
    asked, plan = both
    seen = []

    def planned(*what, options, **how):
        seen.append(options.early_stop is not None)
        return make_plan(*what, options=options, **how)

    monkeypatch.setattr(module, "make_plan", planned)
    early = [one._replace(options=replace(PLAIN, early_stop=lambda _: Ladder())) for one in asked]
    stopped = plan_several(early, cluster(3))
    assert [share.devices for share in stopped.sweeps] == [share.devices for share in plan.sweeps]
    assert stopped.lower_bound_s == plan.lower_bound_s and seen == sorted(seen) and sum(seen) == 2
    assert all(share.plan.expected_s is not None for share in stopped.sweeps)
