"""Layer inputs on the host: only for jobs that nothing else holds; memory and time against closed forms."""

import json
from dataclasses import replace

import pytest

from planner import (
    JobSpec,
    Options,
    PlanError,
    Problem,
    check_plan,
    check_several,
    cpu_device,
    decoder_shape,
    devices,
    explain_plan,
    make_plan,
    plan_several,
    read_memory_points,
    step_memory,
)
from planner.devices import DEVICES
from planner.instance import Instance
from planner.memory import StepShape, memory_terms, offloaded_bytes
from planner.signature import POLICIES
from planner.time import cost_model
from tests.planner.problems import QWEN
from tests.planner.test_memory import RESULTS

BIG = decoder_shape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152_064)
POINTS = RESULTS / "memory-points-h200-offload-2026-12-02.json"
QUICK = Options(published=False)


def job(name: str, tokens: int) -> JobSpec:
    """Make a job of 100 rows of one length, one to a batch."""
    return JobSpec(name, 16, 1, 100, float(tokens), tokens, "rows", accumulate=False)


def test_only_a_job_that_nothing_else_holds_brings_it():
    short, long, one = job("short", 1024), job("long", 12_288), devices("A100-40GB")
    plan = make_plan([short, long], BIG, one, options=QUICK)
    policy = {name: pack.policy for pack in plan.packs for name in pack.jobs}
    assert policy == {"short": "dots", "long": "offload"}
    assert check_plan(plan, [short, long], BIG, one, cost_model(one.spec)) == []
    text = explain_plan(plan, [short, long], BIG, one)
    assert f"inputs wait in {12_288 * 48 * 5120 * 2 / 2**30:.1f} GiB of the host's memory" in text
    for on in ("2xA100-40GB", "A100-40GB+H200"):  # two devices hold it, or another type
        where = devices(on)
        plan = make_plan([short, long], BIG, where, options=QUICK)
        assert "offload" not in {pack.policy for pack in plan.packs}
        costs = {part.spec.name: cost_model(part.spec) for part in where.parts}
        assert check_plan(plan, [short, long], BIG, where, costs) == []
    free = replace(
        cost_model(one.spec), host_bytes_s=1e15
    )  # with it, more slots are all that the host would change
    some, chosen = [job(f"job-{n}", 2048) for n in range(8)], ("none", "dots", "layer", "offload")
    for options, taken in ((QUICK, "layer"), (replace(QUICK, policies=chosen), "offload")):
        plan = make_plan(some, BIG, one, cost_model=free, options=options)
        assert {pack.policy for pack in plan.packs} == {taken}
    spec = cpu_device(2**40).spec  # a CPU that would hold it if its memory were not the host's
    steps = [StepShape(1, 1, 1, 12_288, 16, policy, accumulate=False) for policy in ("layer", "offload")]
    layer, away = (step_memory(BIG, step, "bf16", spec, cost_model(spec).memory) for step in steps)
    assert away < layer
    with pytest.raises(PlanError, match=f"needs {layer / 2**30:.1f} GiB"):
        make_plan([long], BIG, cpu_device(int((layer + away) / 2 / spec.usable)))
    with pytest.raises(PlanError, match="with job long"):
        make_plan([long], BIG, one, options=Options(policies=("none", "dots")))


def test_no_more_is_planned_than_the_host_pins():
    """64 GB of 48 · 5,120 · 2 bytes a token: 130,208 tokens."""
    where = devices("H200")
    for tokens, slots in ((16_384, 7), (43_400, 3), (43_408, 2), (130_208, 1), (130_216, 0)):
        made = Instance(
            [job("one", tokens)], BIG, where, "bf16", cost_model(where.spec), 256, (*POLICIES, "offload")
        )
        assert made.slot_limit(1, 1, "offload", made.own_needs[0]) == slots
    with pytest.raises(PlanError, match="with job one"):  # by `layer`: inputs on the host would not help
        make_plan([job("one", 160_000)], BIG, where, options=QUICK)


def test_sweeps_planned_together_never_have_it():
    """A bound on them is not one on plans with it: one device would do for the long job, and two are planned."""
    shape, on = decoder_shape("tiny", 2, 64, 128, 4, 2, 16, 256), devices("3xA100-40GB")
    asked = [
        Problem("long", [job("one", 12_288)], BIG, options=QUICK),
        Problem("tiny", [job("two", 128)], shape, options=QUICK),
    ]
    plan = plan_several(asked, on)
    assert [len(share.devices) for share in plan.sweeps] == [2, 1]
    assert check_several(plan, asked, on) == []
    with pytest.raises(PlanError, match=r"at least long 2, tiny 1; .* layer inputs in the host's memory"):
        plan_several(asked, devices("2xA100-40GB"))


def test_the_checker_refuses_it_where_every_job_fits_without():
    one, where = job("one", 1024), devices("A100-40GB")
    plan = make_plan([one], BIG, where, options=QUICK)
    shipped = cost_model(where.spec)
    hidden = replace(plan.packs[0], policy="offload")
    (fault,) = [
        f for f in check_plan(replace(plan, packs=(hidden,)), [one], BIG, where, shipped) if "host" in f
    ]
    assert "although every job fits without" in fault


def test_a_step_takes_what_layer_takes_and_a_transfer_of_each_input():
    table, ways = cost_model(DEVICES["A100-40GB"]), (QWEN, 1, "layer", "bf16", 1000.0)
    layer = table.step_cost(*ways)
    away = table.step_cost(QWEN, 1, "offload", "bf16", 1000.0)
    assert away.c - layer.c == pytest.approx(28 * 3584 * 2 / 25e9)
    assert away._replace(c=layer.c) == layer
    measured = replace(table, fitted={"Qwen2.5-7B/1/layer/bf16": [1.0, 2.0, 3.0, 4.0]}, host_bytes_s=1e6)
    assert measured.step_cost(QWEN, 1, "offload", "bf16", 9.0) == (1, pytest.approx(2 + 0.200704), 3, 4)
    assert [cost_model(DEVICES[name]).host_bytes_s for name in ("A100-80GB", "H200")] == [25e9, 47.5e9]


def test_the_device_holds_what_one_layer_works_with():
    """A token's numbers of a layer, Qwen2.5-7B: 7 D, 5 F, 2 q and 2 kv; on the host D of each of 28."""
    step = StepShape(1, 8, 1, 4096, 32, "offload", accumulate=False)
    terms = memory_terms(QWEN, step, "bf16", DEVICES["H200"])
    layer = memory_terms(QWEN, replace(step, policy="layer"), "bf16", DEVICES["H200"])
    one = 7 * 3584 + 5 * 18_944 + 2 * 3584 + 2 * 512
    assert terms["working"] == 32_768 * one * 2
    assert terms.items() <= layer.items() and layer.keys() - terms.keys() == {"saved_layer"}
    assert offloaded_bytes(QWEN, step, "bf16") == 32_768 * 28 * 3584 * 2


def test_compiled_steps_hold_what_is_predicted():
    """As the card's compiler said: within 5 % without the margin, none under with it; the host's bytes exactly."""
    shipped = cost_model(DEVICES["H200"]).memory
    rows = json.loads(POINTS.read_text(encoding="utf-8"))
    points = list(zip(read_memory_points(POINTS), rows, strict=True))
    layer = {(p.shape, p.step): p.bytes for p, _ in points if p.step.policy == "layer"}
    away = [(p, row["host_bytes"]) for p, row in points if p.step.policy == "offload"]
    assert len(away) == len(layer) == 8
    for p, _ in points:
        ways = p.shape, p.step, p.precision, p.device
        assert step_memory(*ways, replace(shipped, margin=0.0)) == pytest.approx(p.bytes, rel=0.05)
        assert p.bytes <= step_memory(*ways, shipped)
    for p, host in away:
        assert host == offloaded_bytes(p.shape, p.step, p.precision)
        assert layer[p.shape, replace(p.step, policy="layer")] - p.bytes > 0.75 * host
