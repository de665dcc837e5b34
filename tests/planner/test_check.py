"""The checker sees each kind of fault when a plan is tampered with."""

from dataclasses import replace
from random import Random

import pytest

from planner import Options, check_plan, cost_model, make_plan
from tests.planner.problems import QWEN, TINY, cluster, job

JOBS = [job(i, (8, 64)[i % 2], (2, 4)[i % 2], i % 2) for i in range(8)]
ON = cluster(2)
COST = cost_model(ON.spec)


@pytest.fixture(scope="module")
def plan():
    return make_plan(JOBS, TINY, ON, options=Options(baselines=False))


def tampered(plan, **changes):
    return replace(plan, packs=(replace(plan.packs[0], **changes), *plan.packs[1:]))


def test_an_honest_plan_has_no_fault(plan):
    assert check_plan(plan, JOBS, TINY, ON, COST) == []


def test_moving_a_jobs_state_takes_time_in_the_bound_too():
    moving = [replace(JOBS[0], state_bytes=10**11)]
    own = make_plan(moving, TINY, ON, options=Options(baselines=False))
    assert own.lower_bound_s > 1e11 / COST.state_bytes_s
    assert check_plan(own, moving, TINY, ON, COST) == []


@pytest.mark.parametrize(
    ("seed", "sites"), [(4, False), (11, False), (16, False), (17, False), (0, True), (5, True), (8, True)]
)
def test_jobs_of_several_optimizers_and_sites_have_a_plan_without_fault(seed, sites):
    """Memory is that of what a pack holds, and the bound that of jobs each of which asks for something else."""
    draw = Random(seed)
    on, shape = cluster(draw.randint(1, 2)), draw.choice((TINY, QWEN))

    def one(i):
        plain = job(i, draw.choice((64, 128, 256)), draw.choice((1, 2)), draw.choice((0, 1)))
        optimizer = draw.choice(("adamw", "adamw_bf16", "sgd"))
        targets = draw.choice((None, frozenset({"q_proj", "v_proj"}))) if sites else None
        return replace(plain, optimizer=optimizer, targets=targets)

    jobs = [one(i) for i in range(draw.randint(4, 14))]
    plan = make_plan(jobs, shape, on, options=Options(baselines=False))
    assert check_plan(plan, jobs, shape, on, COST) == []


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda p: replace(p, packs=p.packs[1:]), "is planned 0 times"),
        (lambda p: replace(p, packs=(*p.packs, p.packs[0])), "is planned 2 times"),
        (lambda p: tampered(p, memory_bytes=p.packs[0].memory_bytes // 2), "bytes, the plan says"),
        (lambda p: tampered(p, step_s=p.packs[0].step_s * 0.9), "a step takes"),
        (lambda p: tampered(p, steps=p.packs[0].steps - 1), "fullest slot needs"),
        (lambda p: tampered(p, m=3), "does not divide batch size"),
        (lambda p: tampered(p, devices=(0, 1)), "of degree 1 is on devices"),
        (lambda p: replace(p, makespan_s=p.makespan_s * 0.9), "the last job ends at"),
        (lambda p: replace(p, lower_bound_s=p.lower_bound_s * 1.01), "does not hold|is above the makespan"),
    ],
)
def test_each_fault_is_seen(plan, tamper, words):
    import re

    faults = check_plan(tamper(plan), JOBS, TINY, ON, COST)
    assert any(re.search(words, fault) for fault in faults), faults


def test_a_plan_over_memory_is_seen(plan):
    pack = plan.packs[0]
    wide = replace(pack, slots=pack.slots * 200)
    faults = check_plan(replace(plan, packs=(wide, *plan.packs[1:])), JOBS, TINY, ON, COST)
    assert any("more than a device may use" in fault for fault in faults)
